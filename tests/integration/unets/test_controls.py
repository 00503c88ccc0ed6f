"""Rows of UNets under ControlNets end as diffusers' pipelines do, alone and in mixed batches; in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.families import Family
from giornata.wire.samplers import Sampler
from giornata_prepost.images.geometry import Size
from tests.integration.unets.controls import control, controlled, expected, under
from tests.integration.unets.served import Asked, Ended, Served, denoised

FAMILIES = (Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT)
Opened = Callable[[Family], Served]
CLOSE = 1e-5
"""Of the largest value."""
PLAIN: dict[str, Any] = {"guidance_scale": 1.0, "negative_prompt": None}


def assert_close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=CLOSE * float(theirs.abs().max()), rtol=0)


def assert_equals(of: Served, mine: Tensor, theirs: Ended, plain: Tensor) -> None:
    error = float((mine - theirs.latents).abs().max() / theirs.latents.abs().max())
    print("ERR", of.card.family, error, float((mine-plain).abs().max()/mine.abs().max()))
    assert_close(mine, theirs.latents)
    assert (mine - plain).abs().max() > 1000 * CLOSE * mine.abs().max(), "the ControlNet is seen"


@pytest.mark.parametrize(
    ("asked", "acts"),
    [
        (Asked(), {}),
        (Asked(**PLAIN, strength=0.6, steps=5), {"scale": 1.3}),
        (Asked(sampler=Sampler.EULER), {"start": 0.25, "end": 0.75}),
        (Asked(sampler=Sampler.HEUN, steps=3, size=Size(64, 128)), {"end": 0.5}),
        (Asked(sampler=Sampler.DPMPP_2M, negative_prompt=None), {"order": "bgr"}),
    ],
    ids=["own", "plain", "scaled", "heun", "reversed"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_equals_the_pipeline(
    family: Family, asked: Asked, acts: dict[str, Any], exact: Opened, tmp_path: Path
) -> None:
    of = exact(family)
    one = control(of, tmp_path / "net", **acts)
    row = of.edit(asked)
    mine = controlled(of, [under(of, row, [one], asked.size)], [one])["edit"]
    assert_equals(of, mine, expected(of, asked, [one]), denoised(of, [row])["edit"])
    assert len(row.prompts) == (1 if asked.guidance_scale == 1.0 else 2)
