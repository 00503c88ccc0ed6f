"""Driven families from door to door: prepost's bytes, the engine's steps, prepost's decoding equal diffusers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from giornata.families import Family
from giornata_prepost.images.geometry import Size
from tests.integration.painting import Served, ended, of_edit, served
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, Caught, Oracle, mask, mask_padding, picture

FAMILIES = (Family.SD3, Family.Z_IMAGE, Family.FLUX2_KLEIN, Family.QWEN_IMAGE, Family.CHROMA)
SIZE = Size(112, 80)
"""35 tokens: Z-Image pads them."""
SEED = 7
LATENT = 3e-5
"""Relative to the largest value."""


@dataclass(frozen=True)
class Case:
    guided: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    strength: float = 1.0


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    family: Family
    served: Served
    oracle: Oracle


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def both(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Both:
    family = Family(request.param)
    folder = tiny_checkpoint(family)
    oracle = Oracle(family, folder)
    if family is Family.CHROMA:
        mask_padding(oracle.pipeline)
    return Both(family, served(folder), oracle)


def scale(family: Family, value: float) -> dict[str, Any]:
    return {"true_cfg_scale" if family is Family.QWEN_IMAGE else "guidance_scale": value}


@pytest.mark.parametrize(("value", "steps", "strength"), [(2.5, 3, 1.0), (0.5, 2, 1.0), (0.0, 4, 0.6), (4.0, 4, 0.6)])
def test_an_edit_equals_diffusers_pipeline(both: Both, value: float, steps: int, strength: float) -> None:
    s, f = both.served, both.family
    told = scale(f, value)
    asked = {"prompt": PROMPT, "num_inference_steps": steps, "strength": strength, "seed": SEED}
    if f is Family.QWEN_IMAGE and value < 1:
        told = {"true_cfg_scale": 1.0}
    guided = value > s.card.guided_above if s.card.guided_above is not None else value > 1
    negative = {"negative_prompt": NEGATIVE} if guided and f is not Family.FLUX2_KLEIN else {}
    row = s.edited("edit", of_edit(s.card, **asked, **told, **negative), picture(SIZE), mask(SIZE))
    assert (len(row.prompts) == 2) == guided
    mine = ended(s.checkpoint, [row])["edit"].latent
    theirs = both.oracle.run(SEED, size=SIZE, steps=steps, strength=strength, **told)
    lat = theirs.latents
    if lat.ndim == 4:
        lat = torch.nn.functional.pixel_unshuffle(lat, 2)[0].flatten(1).T
    else:
        lat = lat[0]
    err = float((mine - lat).abs().max() / lat.abs().max())
    painted = s.images.decode(mine, SIZE).astype(int)
    d = np.abs(painted - theirs.picture.astype(int)).max()
    print("\nRESULT", f, value, steps, strength, err, d, theirs.picture.std())
    assert err < LATENT and d <= 1
