"""A full computation of a UNet checkpoint ends as diffusers' own pipeline does, from the prompt to the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from giornata.families import Family
from giornata.wire.samplers import Sampler
from giornata_lab.baseline.pipeline import PIPELINES, opened
from giornata_prepost.families.protocol import GeneratingModel
from giornata_prepost.images.geometry import Size
from tests.distances import distance
from tests.integration.unets.served import Asked, Ended, Served, denoised

FAMILIES = (Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT)
Opened = Callable[[Family], Served]

CLOSE = 3e-5
"""Tolerance over the largest value: processors group float32 sums otherwise, and steps pass that on."""


def assert_equals(of: Served, mine: Tensor, theirs: Ended, size: Size) -> None:
    assert distance(mine, theirs.latents) <= CLOSE
    painted = of.images.decode(mine, size)
    assert np.abs(painted.astype(int) - theirs.picture.astype(int)).max() <= 1
    assert theirs.picture.std() > 5


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(guidance_scale=1.0, negative_prompt=None, strength=0.6, steps=5),
        Asked(sampler=Sampler.EULER_ANCESTRAL, strength=0.8, size=Size(64, 128)),
        Asked(sampler=Sampler.DPMPP_2M, negative_prompt=None, seed=8),
        Asked(sampler=Sampler.DPMPP_2M_SDE, guidance_scale=1.0, negative_prompt=None),
    ],
    ids=["own", "plain", "ancestral", "multistep", "sde"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_equals_the_inpainting_pipeline(family: Family, asked: Asked, served: Opened) -> None:
    of = served(family)
    row = of.edit(asked)
    mine, theirs = denoised(of, [row])["edit"], of.edited(asked)
    assert_equals(of, mine, theirs, asked.size)
    assert len(row.prompts) == (1 if asked.guidance_scale == 1.0 else 2)


@pytest.mark.parametrize(
    "asked",
    [
        Asked(strength=0.6, steps=5),
        Asked(guidance_scale=1.0, negative_prompt=None),
        Asked(sampler=Sampler.EULER_ANCESTRAL, strength=0.8, size=Size(64, 128)),
    ],
    ids=["own", "at full strength", "ancestral"],
)
@pytest.mark.parametrize("family", [Family.SD, Family.SDXL])
def test_an_edit_of_a_whole_picture_equals_the_image_to_image_pipeline(
    family: Family, asked: Asked, served: Opened
) -> None:
    of = served(family)
    mine, theirs = denoised(of, [of.edit(asked, whole=True)])["edit"], of.remade(asked)
    assert_equals(of, mine, theirs, asked.size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_equals_the_pipeline_with_their_embeddings(family: Family, served: Opened) -> None:
    """Alone, and beside a short one; also where only one half has two chunks."""
    of = served(family)
    room = of.card.max_text_tokens - 2
    long = Asked(
        prompt=" ".join(["red"] * room + ["dog"]), negative_prompt=" ".join(["hat"] * room + ["red"])
    )
    embeds = of.images.encode_text(long.prompt, long.size) | of.images.encode_unguided(
        long.negative_prompt, long.size
    )
    given = {name: tensor[None] for name, tensor in embeds.items() if name.endswith("prompt_embeds")}
    assert given["prompt_embeds"].shape[1] == 2 * of.card.max_text_tokens
    theirs = of.edited(replace(long, prompt=None, negative_prompt=None), **given)  # type: ignore[arg-type]
    assert_equals(of, denoised(of, [of.edit(long)])["edit"], theirs, long.size)
    uneven = replace(long, negative_prompt="blurry")
    alone = denoised(of, [of.edit(uneven, "a")])["a"]
    both = denoised(of, [of.edit(uneven, "a"), of.edit(Asked(), "b")])
    scale = float(alone.abs().max())
    torch.testing.assert_close(both["a"], alone, atol=CLOSE * scale, rtol=0)
    assert not torch.equal(alone, denoised(of, [of.edit(replace(uneven, prompt="red"), "c")])["c"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_sees_another_seed(family: Family, served: Opened) -> None:
    of, asked = served(family), Asked(guidance_scale=1.0, negative_prompt=None, steps=2)
    rows = [of.edit(replace(asked, seed=seed), f"{seed}") for seed in (7, 8)]
    one, other = denoised(of, rows).values()
    assert (one - other).abs().max() > 100 * CLOSE * one.abs().max()


@pytest.mark.parametrize(
    "asked",
    [
        Asked(),
        Asked(guidance_scale=1.0, negative_prompt=None, size=Size(64, 128)),
        Asked(sampler=Sampler.EULER_ANCESTRAL, negative_prompt=None, seed=8),
        Asked(sampler=Sampler.DPMPP_2M),
    ],
    ids=["own", "plain", "ancestral", "multistep"],
)
@pytest.mark.parametrize("family", [Family.SD, Family.SDXL])
def test_a_generation_equals_the_text_to_image_pipeline(family: Family, asked: Asked, served: Opened) -> None:
    of = served(family)
    mine, theirs = denoised(of, [of.generation(asked)])["generation"], of.generated(asked)
    assert_equals(of, mine, theirs, asked.size)


@pytest.mark.parametrize("family", [Family.SD_INPAINT, Family.SDXL_INPAINT])
def test_a_unet_that_sees_mask_and_picture_generates_nothing(family: Family, served: Opened) -> None:
    of = served(family)
    assert of.card.tasks == ("edit",)
    assert not isinstance(of.images, GeneratingModel)


def test_a_model_that_predicts_velocity_equals_its_pipelines(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """As Stable Diffusion 2.1 does, with its scheduler."""
    scheduler: Any = DDIMScheduler
    pipeline = opened(PIPELINES[Family.SD], tiny_checkpoint(Family.SD))
    pipeline.scheduler = scheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type="v_prediction",
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipeline.save_pretrained(tmp_path)
    of, asked = Served.open(Family.SD, tmp_path), Asked(steps=3)
    assert of.card.default_sampler == Sampler.DDIM
    ended = denoised(of, [of.edit(asked), of.generation(asked)])
    assert_equals(of, ended["edit"], of.edited(asked), asked.size)
    assert_equals(of, ended["generation"], of.generated(asked), asked.size)
