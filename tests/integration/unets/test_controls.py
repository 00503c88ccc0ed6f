"""Rows of UNets under ControlNets end as diffusers' pipelines do, alone and in mixed batches; in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
"""Tolerance, as a share of the largest value."""
PLAIN: dict[str, Any] = {"guidance_scale": 1.0, "negative_prompt": None}


def assert_close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=CLOSE * float(theirs.abs().max()), rtol=0)


def assert_equals(mine: Tensor, theirs: Ended, plain: Tensor) -> None:
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
    assert_equals(mine, expected(of, asked, [one]), denoised(of, [row])["edit"])
    assert len(row.prompts) == (1 if asked.guidance_scale == 1.0 else 2)


@pytest.mark.parametrize("family", [Family.SD_INPAINT, Family.SDXL])
def test_several_nets_are_summed(family: Family, exact: Opened, tmp_path: Path) -> None:
    of, asked = exact(family), Asked(sampler=Sampler.EULER, steps=5)
    nets = [
        control(of, tmp_path / "0", seed=1, scale=0.7),
        control(of, tmp_path / "1", seed=2, scale=1.1, start=0.4, order="bgr"),
        control(of, tmp_path / "2", seed=3, scale=0.4, end=0.2),
    ]
    row = of.edit(asked)
    mine = controlled(of, [under(of, row, nets, asked.size)], nets)["edit"]
    assert_equals(mine, expected(of, asked, nets), denoised(of, [row])["edit"])


@pytest.mark.parametrize("family", [Family.SD, Family.SDXL_INPAINT])
def test_rows_with_and_without_share_steps(family: Family, exact: Opened, tmp_path: Path) -> None:
    """Rows of different sizes, texts, samplers and numbers of steps; of two, the ControlNets are the same."""
    of = exact(family)
    one, other = (control(of, tmp_path / str(seed), seed=seed) for seed in range(2))
    weak = replace(one, scale=0.3, end=0.5)
    asked = {
        "guided": (Asked(), [one]),
        "plain": (Asked(**PLAIN, steps=3, seed=9), []),
        "weak": (Asked(**PLAIN, size=Size(64, 128), sampler=Sampler.HEUN, steps=2), [weak, other]),
        "another": (Asked(prompt="a cat", seed=8, sampler=Sampler.DPMPP_2M, strength=0.7, steps=6), [one]),
    }
    plain = {job: of.edit(how, job) for job, (how, _) in asked.items()}
    rows = [under(of, plain[job], nets, how.size) for job, (how, nets) in asked.items()]
    mine, without = controlled(of, rows, [one, other]), denoised(of, list(plain.values()))
    for job, (how, nets) in asked.items():
        if nets:
            assert_equals(mine[job], expected(of, how, nets), without[job])
        else:
            assert_close(mine[job], without[job])


@pytest.mark.parametrize("family", [Family.SD, Family.SDXL])
def test_a_controlnet_sees_a_prompt_in_chunks(family: Family, exact: Opened, tmp_path: Path) -> None:
    """Its halves have texts of different lengths, and beside it is a row with a short prompt."""
    of, words = exact(family), " ".join(["red"] * 80)
    one = control(of, tmp_path / "net")
    asked = {"long": Asked(prompt=words, steps=2), "short": Asked(steps=2)}
    plain = {job: of.edit(how, job) for job, how in asked.items()}
    rows = [under(of, plain[job], [one], how.size) for job, how in asked.items()]
    both, alone = controlled(of, rows, [one]), controlled(of, rows[:1], [one])
    assert_close(both["long"], alone["long"])
    assert_close(both["short"], expected(of, asked["short"], [one]).latents)
    assert not torch.equal(both["long"], denoised(of, [plain["long"]])["long"])
