"""Rows of SD3 under ControlNets end as diffusers' pipelines do, with what prepost encodes of control images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from diffusers import (
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetInpaintingPipeline,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3InpaintPipeline,
)
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.wire.adapters import ControlInput
from giornata_prepost.images.geometry import Size
from tests.integration.prepost.oracle import mask, picture
from tests.integration.sd3_controls import Asked, Control, Expanded, Sd3, alike, maps, shown, wrapped

CLOSE: Final = 1e-5
"""Tolerance, as a share of the largest value."""
SIZE: Final = Size(112, 80)
TOLD: Final[dict[str, Any]] = {"force_zeros_for_pooled_projection": False}
MASKED: Final[dict[str, Any]] = {"extra_conditioning_channels": 1}
INSTANTX: Final[dict[str, Any]] = {"dual_attention_layers": (), "qk_norm": None}


@pytest.fixture(scope="module")
def sd3(tiny_checkpoint: Callable[[Family], Path]) -> Sd3:
    return Sd3(tiny_checkpoint(Family.SD3))


def assert_close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=CLOSE * float(theirs.abs().max()), rtol=0)


def assert_seen(sd3: Sd3, row: Any, mine: Tensor) -> None:
    (plain,) = sd3.ended([replace(row, adapters=type(row.adapters)(), control_images=())]).values()
    assert (mine - plain).abs().max() > 1000 * CLOSE * mine.abs().max(), "the ControlNet is seen"


def expected(sd3: Sd3, asked: Asked, controls: Sequence[Control], multi: Any = None) -> Tensor:
    """What `StableDiffusion3ControlNetPipeline` makes; `multi` is of several ControlNets."""
    each = {
        "controlnet_conditioning_scale": [one.scale for one in controls],
        "control_guidance_start": [one.start for one in controls],
        "control_guidance_end": [one.end for one in controls],
        "control_image": shown(asked.size, len(controls)),
    }
    told = each if multi is not None else {name: values[0] for name, values in each.items()}  # type: ignore[index]  # lists
    nets = [one.net for one in controls]
    with alike(nets):
        return sd3.called(
            StableDiffusion3ControlNetPipeline, asked, nets[0] if multi is None else multi, **told
        )


@pytest.mark.parametrize(
    ("options", "depth", "asked", "acts"),
    [
        (INSTANTX, 2, Asked(SIZE), {}),
        (TOLD, 1, Asked(SIZE, guidance=1.0), {"scale": 1.3}),
        (TOLD, 3, Asked(Size(64, 96)), {"start": 0.25, "end": 0.75}),
        ({}, 2, Asked(SIZE, steps=3), {"end": 0.7}),
    ],
    ids=["instantx", "told the pooled text", "within its steps", "3.5"],
)
def test_a_generation_equals_the_pipeline(
    sd3: Sd3, tmp_path: Path, options: dict[str, Any], depth: int, asked: Asked, acts: dict[str, Any]
) -> None:
    one = sd3.control(tmp_path / "net", depth, of=options, **acts)
    assert one.sees is (ControlInput.USUAL if options is TOLD else ControlInput.UNSHIFTED)
    row = sd3.row("made", asked, [one])
    mine = sd3.ended([row], [one])["made"]
    assert_close(mine, expected(sd3, asked, [one]))
    assert_seen(sd3, row, mine)
    assert len(row.prompts) == (2 if asked.guidance > 1 else 1)


@pytest.mark.parametrize("options", [MASKED, MASKED | TOLD], ids=["usual", "told otherwise"])
def test_a_net_that_sees_the_mask_equals_the_pipeline(
    sd3: Sd3, tmp_path: Path, options: dict[str, Any]
) -> None:
    """That pipeline completes a picture from noise alone: the mask is in the control image, and nothing is blended."""
    asked = Asked(SIZE)
    one = sd3.control(tmp_path / "net", of=options)
    assert one.sees is ControlInput.MASKED
    row = sd3.row("made", asked, [one])
    assert row.control_images[0].shape == (35, 4 * 17)
    with alike([one.net]):
        theirs = sd3.called(
            StableDiffusion3ControlNetInpaintingPipeline,
            asked,
            one.net,
            control_image=shown(SIZE, 1)[0],
            control_mask=Image.fromarray(mask(SIZE)),
            controlnet_conditioning_scale=one.scale,
        )
    mine = sd3.ended([row], [one])["made"]
    assert_close(mine, theirs)
    assert_seen(sd3, row, mine)


@pytest.mark.parametrize("options", [TOLD, INSTANTX, MASKED], ids=["usual", "instantx", "masked"])
def test_an_edit_equals_the_pipeline_whose_transformer_is_wrapped(
    sd3: Sd3, tmp_path: Path, options: dict[str, Any]
) -> None:
    asked = Asked(SIZE)
    one = sd3.control(tmp_path / "net", of=options)
    row = sd3.row("edit", asked, [one], edit=True)
    hint = maps(row.control_images[0], row.grid)
    shown_to = {"image": Image.fromarray(picture(SIZE)), "mask_image": Image.fromarray(mask(SIZE))}
    with wrapped(sd3.pipeline.transformer, one, hint, zeros=options is not TOLD):
        theirs = sd3.called(StableDiffusion3InpaintPipeline, asked, **shown_to, strength=1.0)
    mine = sd3.ended([row], [one])["edit"]
    assert_close(mine, theirs)
    assert_seen(sd3, row, mine)


def test_two_nets_are_summed(sd3: Sd3, tmp_path: Path) -> None:
    """Nets of one depth as in `SD3MultiControlNetModel`; of two, it drops what the first does not have."""
    asked = Asked(
        SIZE, steps=5, guidance=1.0
    )  # guided, diffusers draws more of the first image before the second
    one, other, deep = (
        sd3.control(tmp_path / str(seed), depth, seed=seed, of=TOLD, **acts)
        for seed, depth, acts in ((0, 1, {}), (1, 1, {"scale": 0.4, "start": 0.4}), (2, 3, {"scale": 1.1}))
    )
    blocks = len(sd3.pipeline.transformer.transformer_blocks)
    rows = [sd3.row("alike", asked, [one, other]), sd3.row("deep", asked, [one, deep])]
    mine = sd3.ended(rows, [one, other, deep])
    multi: Any = SD3MultiControlNetModel
    assert_close(mine["alike"], expected(sd3, asked, [one, other], multi([one.net, other.net])))
    assert_close(mine["deep"], expected(sd3, asked, [one, deep], Expanded([one.net, deep.net], blocks)))
    dropped = expected(sd3, asked, [one, deep], multi([one.net, deep.net]))
    assert (mine["deep"] - dropped).abs().max() > 1000 * CLOSE


def test_rows_with_and_without_share_steps(sd3: Sd3, tmp_path: Path) -> None:
    one, other = (sd3.control(tmp_path / str(seed), seed=seed, of=TOLD) for seed in range(2))
    small = Asked(Size(64, 96), steps=3, guidance=1.0, seed=9)
    rows = [
        sd3.row("guided", Asked(SIZE), [one]),
        sd3.row("plain", Asked(SIZE, seed=8), []),
        sd3.row("small", small, [one, other]),
        sd3.row("edit", Asked(SIZE, steps=5), [other], edit=True),
    ]
    together = sd3.ended(rows, [one, other])
    for row in rows:
        alone = sd3.ended([row], [one, other])
        assert_close(together[row.key.job_id], alone[row.key.job_id])
    assert_close(together["guided"], expected(sd3, Asked(SIZE), [one]))
    multi: Any = SD3MultiControlNetModel
    assert_close(together["small"], expected(sd3, small, [one, other], multi([one.net, other.net])))
