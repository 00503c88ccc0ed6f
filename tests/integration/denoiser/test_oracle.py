"""One row of the engine equals diffusers' own pipeline with the same seed, through a checkpoint on disk.

In float64 they are equal. In float32, where rounding depends on the processor, the engine is as near to the exact
latent as diffusers is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distances import distance
from tests.integration.denoiser.oracle import (
    Edit,
    Models,
    conditioning,
    decoded,
    diffusers_latent,
    engine_latent,
    generated_latent,
    noise,
    repainted_latent,
)
from tests.precision import float32_bound

LATENT_TOLERANCE = 1e-5
"""Largest distance in float64."""
PICTURE_TOLERANCE = 1 / 255


def assert_equals_diffusers(models: Models, edit: Edit) -> None:
    model = models.double
    mine, theirs = engine_latent(model, edit, conditioning(model, edit)), diffusers_latent(model, edit)
    assert distance(mine, theirs) <= LATENT_TOLERANCE
    pictures = decoded(model, edit, mine) - decoded(model, edit, theirs)
    assert pictures.abs().max() <= PICTURE_TOLERANCE
    other = diffusers_latent(model, replace(edit, seed=edit.seed + 1))
    assert (mine - other).abs().max() > 100 * LATENT_TOLERANCE  # the comparison can fail
    assert_errs_no_more_than_diffusers(models, edit)


def assert_errs_no_more_than_diffusers(models: Models, edit: Edit) -> None:
    """In float32, from the tensors that diffusers draws in float32."""
    model, drawn = models.single, conditioning(models.single, edit)
    exact = engine_latent(models.double, edit, {name: tensor.double() for name, tensor in drawn.items()})
    mine, theirs = engine_latent(model, edit, drawn), diffusers_latent(model, edit)
    assert mine.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(mine.double(), exact, atol=float32_bound(theirs, exact), rtol=0)
    pictures = decoded(model, edit, mine) - decoded(model, edit, theirs)
    assert pictures.abs().max() <= PICTURE_TOLERANCE


@pytest.mark.parametrize(
    "edit",
    [
        Edit(strength=1.0),
        Edit(strength=0.6, steps=8, width=64, height=112, guidance_scale=30.0),
        Edit(true_cfg_scale=4.0, strength=0.6),
        Edit(steps=1),
    ],
)
def test_inpainting_equals_diffusers(inpaint: Models, edit: Edit) -> None:
    assert_equals_diffusers(inpaint, edit)


@pytest.mark.parametrize("edit", [Edit(strength=0.6), Edit(true_cfg_scale=2.5)])
def test_a_checkpoint_without_distilled_guidance_equals_diffusers(undistilled: Models, edit: Edit) -> None:
    assert not undistilled.single.checkpoint.card.takes_guidance
    assert_equals_diffusers(undistilled, edit)


@pytest.mark.parametrize(
    "edit", [Edit(guidance_scale=30.0), Edit(strength=0.6), Edit(width=48, height=80, steps=3)]
)
def test_fill_equals_diffusers(fill: Models, edit: Edit) -> None:
    assert_equals_diffusers(fill, edit)


@pytest.mark.parametrize(
    "edit", [Edit(), Edit(true_cfg_scale=2.5, steps=3), Edit(width=48, height=80, steps=2, seed=8)]
)
def test_a_generation_equals_the_text_to_image_pipeline(inpaint: Models, edit: Edit) -> None:
    model = inpaint.double
    mine, theirs = engine_latent(model, edit, noise(model, edit)), generated_latent(model, edit)
    assert distance(mine, theirs) <= LATENT_TOLERANCE
    assert (mine - engine_latent(model, edit, noise(model, replace(edit, seed=9)))).abs().max() > 0.1
    exact = engine_latent(
        model, edit, {name: one.double() for name, one in noise(inpaint.single, edit).items()}
    )
    mine, theirs = (
        engine_latent(inpaint.single, edit, noise(inpaint.single, edit)),
        generated_latent(inpaint.single, edit),
    )
    torch.testing.assert_close(mine.double(), exact, atol=float32_bound(theirs, exact), rtol=0)


@pytest.mark.parametrize("edit", [Edit(strength=0.6), Edit(strength=0.9, true_cfg_scale=2.5)])
def test_an_edit_of_the_whole_picture_equals_the_image_to_image_pipeline(inpaint: Models, edit: Edit) -> None:
    model = inpaint.double
    tensors = conditioning(model, edit)
    tensors["mask"] = torch.ones_like(tensors["mask"])
    mine, theirs = engine_latent(model, edit, tensors), repainted_latent(model, edit)
    assert distance(mine, theirs) <= LATENT_TOLERANCE
