"""An edit of a UNet with a recording of its picture, as the denoiser's service makes both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from giornata.wire.models import Sampler
from giornata.wire.requests import Reuse
from giornata_denoiser.templates.identity import LEVELS_TOGETHER
from tests.integration.conformance.families import OpenFamily
from tests.integration.conformance.worker import asked_of, worker


@pytest.mark.parametrize(
    ("name", "sampler"), [("sdxl", Sampler.EULER_ANCESTRAL), ("sd-inpaint", Sampler.PNDM)]
)
async def test_a_strict_edit_takes_from_the_recording_of_its_own_levels(
    name: str, sampler: Sampler, opened_family: Callable[[str], OpenFamily]
) -> None:
    async with worker(opened_family(name).served) as made:
        request = await asked_of(made, num_inference_steps=4, strength=0.8, sampler=sampler)
        seen = await made.edited(request)
    row = seen[-1]
    assert row.template is not None
    assert len(row.template.entries) == row.steps == len(seen)
    levels = [entry.level for entry in row.template.entries]
    assert levels == pytest.approx(row.track.levels[:-1].tolist())
    assert row.corrections is not None, (
        "it has computed its first step in full, and its tile alone in the others"
    )
    assert row.region is not None
    assert row.region.computed.tolist() == [0]
    for each in seen:
        assert each.latent.isfinite().all()
        picture = row.picture_at(each.step)
        assert (picture is None) == (name == "sdxl" or each.done), "what blends is held to its own picture"
        picture = row.conditioning["image_latents"] if picture is None else picture
        noised = row.track.noised(picture, row.conditioning["noise"], each.step)
        torch.testing.assert_close(each.latent[1:], noised[1:])


async def test_an_edit_reuses_unless_it_asks_not_to(opened_family: Callable[[str], OpenFamily]) -> None:
    """By default: one recording serves samplers and numbers of steps; each edit begins in full, and corrects it."""
    async with worker(opened_family("sd-inpaint").served) as made:
        first = await made.edited(
            await asked_of(made, Reuse.AUTO, num_inference_steps=3, sampler=Sampler.DDIM)
        )
        other = {"num_inference_steps": 5, "sampler": Sampler.UNIPC}
        second = await made.edited(await asked_of(made, Reuse.AUTO, **other))
        off = await made.edited(await asked_of(made, Reuse.OFF, **other))
    for row in (*first, *second):
        assert row.template is not None
        assert len(row.template.entries) == LEVELS_TOGETHER
        assert row.region is not None
        assert row.computed_tokens == 1
        assert row.latent.isfinite().all()
    assert second[0].template is first[0].template
    for edit in (first, second):
        assert [row.taught for row in edit] == [True] + [False] * (len(edit) - 1)
    assert off[-1].template is None
    assert off[-1].computed_tokens == off[-1].image_tokens
