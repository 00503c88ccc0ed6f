"""Forwards of groups: equal to one process's and to diffusers', whichever devices compute which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from giornata.packed.uses import BlockInputs
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import Members
from tests.integration.denoiser.parallel.steps import TOLERANCE, Made, walk


def nothing(_: ModelFamily) -> Sequence[BlockInputs]:
    return ()


def unequal(*, fill: bool = False) -> Made:
    """Rows of different sizes, prompts and guidance."""
    of = tiny_flux.family(fill=fill)
    specs = [
        Spec("first", grid=(5, 7), text_tokens=3, steps=6, seed=1),
        Spec("guided", grid=(4, 4), text_tokens=6, steps=6, seed=2, true_cfg_scale=2.5, guidance_scale=2.0),
        Spec("small", grid=(1, 3), text_tokens=1, steps=6, seed=3),
    ]
    return of, [tiny_flux.row(of, spec) for spec in specs], nothing


def one_token() -> Made:
    """A picture and a prompt of one token each: some members have none."""
    of = tiny_flux.family()
    return of, [tiny_flux.row(of, Spec(grid=(1, 1), text_tokens=1, steps=3))], nothing


@pytest.mark.parametrize("fill", [False, True])
def test_degree_and_devices_change_between_steps(members: Members, fill: bool) -> None:
    making = partial(unequal, fill=fill)
    plan = [(0,), (0, 1), (0, 1, 2, 3), (2, 3), (1, 3, 0), (3,)]
    walked = walk(members, making, plan)
    if not fill:
        of, (first, *_), _ = making()
        for step, latents in enumerate(walked[:-1]):
            at = replace(first, latent=torch.from_numpy(latents[0]), step=step)
            np.testing.assert_allclose(walked[step + 1][0], by_diffusers(of, at), rtol=0, atol=TOLERANCE)


def by_diffusers(of: ModelFamily, row: Row) -> Any:
    """The row's latent after its next step, by diffusers' own forward of that row alone."""
    sigma, after = row.track.levels[row.step], row.track.levels[row.step + 1]
    height, width = row.grid
    ids = torch.zeros(height * width, 3)
    ids[:, 1:] = torch.cartesian_prod(torch.arange(float(height)), torch.arange(float(width)))
    prompt, network = cast("Any", row.prompts[0]), cast("Any", of.network)
    with torch.inference_mode():
        velocity = network.transformer(
            hidden_states=row.latent[None],
            encoder_hidden_states=prompt.embeds[None],
            pooled_projections=prompt.pooled[None],
            timestep=torch.as_tensor([sigma]),
            img_ids=ids,
            txt_ids=torch.zeros(len(prompt.embeds), 3),
            guidance=torch.tensor([prompt.guidance_scale]),
            return_dict=False,
        )[0][0]
        latent = row.latent + (after - sigma) * velocity
        mask = row.conditioning["mask"]
        picture = row.track.noised(row.conditioning["image_latents"], row.conditioning["noise"], row.step + 1)
        return ((1 - mask) * picture + mask * latent).numpy()


def test_members_may_have_no_token(members: Members) -> None:
    walk(members, one_token, [(0, 1, 2, 3), (1, 2, 3), (0, 1)])
