"""Rows under ControlNets equal diffusers' pipelines, alone and in mixed batches; in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata_denoiser.rows.row import NONE, RowControl
from giornata_lab.bench.compute import tiny_flux
from tests.fakes.tiny_flux_control import net
from tests.integration.denoiser.controls import (
    Caught,
    computed,
    controlled_row,
    inpainted,
    opened,
    wrapped,
)
from tests.integration.denoiser.oracle import Edit, Model, conditioning, diffusers_latent, engine_latent

TOLERANCE = 1e-5
EDIT = Edit(steps=4)
USUAL: dict[str, Any] = {"controlnet_conditioning_scale": 0.7}


def use(card: Any, scale: float = 0.7, first: int = 0, end: int = 4, mode: int | None = None) -> RowControl:
    return RowControl(card.name, card.digest, scale, first, end, mode)


@pytest.mark.parametrize(
    ("edit", "shape", "how", "acts"),
    [
        (EDIT, (2, 2), USUAL, {}),
        (EDIT, (1, 1), USUAL, {}),
        (EDIT, (2, 0), USUAL, {}),
        (Edit(steps=6, strength=0.6, guidance_scale=30.0), (1, 2), USUAL, {"end": 4}),
        (
            EDIT,
            (2, 1),
            USUAL | {"control_guidance_start": 0.25, "control_guidance_end": 0.75},
            {"first": 1, "end": 3},
        ),
    ],
)
def test_a_row_equals_the_pipeline(
    inpaint: Model,
    tmp_path: Path,
    edit: Edit,
    shape: tuple[int, int],
    how: dict[str, Any],
    acts: dict[str, int],
) -> None:
    model = inpaint
    made = net(*shape).double()
    theirs, caught = inpainted(model, edit, [made], how)
    loaded = opened(made, tmp_path / "net", torch.float64)
    (mine,) = computed(model, [controlled_row(model, edit, caught, [use(loaded.card, **acts)])], [loaded])
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    plain = engine_latent(model, edit, caught.conditioning)
    assert (mine - plain).abs().max() > 1000 * TOLERANCE, "the ControlNet is seen"


def test_a_union_equals_the_pipeline_in_each_mode(inpaint: Model, tmp_path: Path) -> None:
    model, made = inpaint, net(2, 1, num_mode=3).double()
    loaded = opened(made, tmp_path / "net", torch.float64)
    found = []
    for mode in (0, 2):
        theirs, caught = inpainted(model, EDIT, [made], USUAL | {"control_mode": mode})
        asked = controlled_row(model, EDIT, caught, [use(loaded.card, mode=mode)])
        (mine,) = computed(model, [asked], [loaded])
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
        found.append(mine)
    assert (found[0] - found[1]).abs().max() > 100 * TOLERANCE


def test_a_net_that_embeds_pixels_itself_equals_the_pipeline(inpaint: Model, tmp_path: Path) -> None:
    """XLabs' ControlNets do so: no autoencoder sees the control image, and blocks take samples in turns."""
    model = inpaint
    made = net(2, 1, conditioning_embedding_channels=tiny_flux.LATENT // 4, patch_size=2).double()
    theirs, caught = inpainted(model, EDIT, [made], USUAL)
    assert caught.images[0].shape == (3, EDIT.height, EDIT.width)
    loaded = opened(made, tmp_path / "net", torch.float64)
    (mine,) = computed(model, [controlled_row(model, EDIT, caught, [use(loaded.card)])], [loaded])
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    plain = engine_latent(model, EDIT, caught.conditioning)
    assert (mine - plain).abs().max() > 1000 * TOLERANCE, "the ControlNet is seen"


def test_two_nets_are_summed(inpaint: Model, tmp_path: Path) -> None:
    model = inpaint
    made = [net(2, 1, seed=seed).double() for seed in range(2)]
    how: dict[str, Any] = {
        "controlnet_conditioning_scale": [0.7, 0.4],
        "control_guidance_start": [0.0, 0.5],
        "control_guidance_end": [1.0, 1.0],
        "control_mode": [0, 0],  # nets without modes do not read it, and several are not run without
    }
    theirs, caught = inpainted(model, EDIT, made, how)
    loaded = [opened(one, tmp_path / str(nth), torch.float64) for nth, one in enumerate(made)]
    acts = [use(loaded[0].card), use(loaded[1].card, 0.4, first=2)]
    (mine,) = computed(model, [controlled_row(model, EDIT, caught, acts)], loaded)
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


def test_rows_with_and_without_share_steps(inpaint: Model, tmp_path: Path) -> None:
    model, other = inpaint, Edit(steps=3, width=48, height=80)
    made = net(2, 1).double()
    loaded = opened(made, tmp_path / "net", torch.float64)
    theirs, caught = inpainted(model, EDIT, [made], USUAL)
    small, caught_small = inpainted(model, other, [made], {"controlnet_conditioning_scale": 1.2})
    plain_row = controlled_row(model, EDIT, caught, (), 1)
    rows = [
        controlled_row(model, EDIT, caught, [use(loaded.card)]),
        replace(plain_row, adapters=NONE),
        controlled_row(model, other, caught_small, [use(loaded.card, 1.2, end=3)], 2),
    ]
    mine = computed(model, rows, [loaded])
    plain = engine_latent(model, EDIT, caught.conditioning)
    for got, expected in zip(mine, (theirs, plain, small), strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("models", "edit"),
    [("fill", EDIT), ("undistilled", Edit(steps=3, true_cfg_scale=2.5))],
    ids=("fill", "guided"),
)
def test_a_row_equals_a_pipeline_whose_transformer_is_wrapped(
    request: pytest.FixtureRequest, tmp_path: Path, models: str, edit: Edit
) -> None:
    """Fill; and guidance, where the negative half gets the positive's samples, as in `FluxControlNetPipeline`."""
    model = request.getfixturevalue(models)
    made = net(2, 1, guidance_embeds=models == "fill").double()
    caught = Caught()
    caught.conditioning = conditioning(model, edit)
    caught.images = [torch.randn(edit.grid[0] * edit.grid[1], tiny_flux.LATENT, dtype=torch.float64)]
    with wrapped(model.pipeline.transformer, made, caught.images[0], 0.7):
        theirs = diffusers_latent(model, edit)
    loaded = opened(made, tmp_path / "net", torch.float64)
    asked = controlled_row(model, edit, caught, [use(loaded.card, end=edit.steps)])
    (mine,) = computed(model, [asked], [loaded])
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    plain = engine_latent(model, edit, caught.conditioning)
    assert (mine - plain).abs().max() > 1000 * TOLERANCE, "the ControlNet is seen"
