"""The baseline server paints with diffusers' own pipelines, of families that are served and of others."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionInpaintPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_lab.baseline.pipeline import PIPELINES, Pipeline, opened
from giornata_lab.baseline.server import BatchPolicy
from giornata_tools.checkout import TRAINED
from giornata_tools.model.random.text_encoders import clip_tokenizer
from tests.integration.baseline.served import FOREVER_S, MASKS, PICTURES, SIZE, edited, pixels, served


@pytest.mark.parametrize("family", list(PIPELINES))
async def test_a_batch_is_the_pipelines_own(
    family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    folder = tiny_checkpoint(family)
    pipeline = Pipeline(str(folder), torch.device("cpu"), torch.float32)
    async with served(pipeline, BatchPolicy(3, FOREVER_S)) as http:
        answers = [
            body
            for _, body in await asyncio.gather(
                *(edited(http, number, num_inference_steps="2", strength="0.8") for number in range(3))
            )
        ]
    assert [body["static_batching"][0]["batch"] for body in answers] == [3, 3, 3]
    own = opened(PIPELINES[family], folder, dtype=torch.float32)
    order = sorted(range(3), key=lambda number: answers[number]["static_batching"][0]["place"])
    expected = own(
        prompt=[f"hat {number}" for number in order],
        image=[Image.open(io.BytesIO(PICTURES[number])) for number in order],
        mask_image=[Image.fromarray(MASKS[number].astype(np.uint8) * np.uint8(255)) for number in order],
        width=SIZE[0],
        height=SIZE[1],
        generator=[torch.Generator().manual_seed(number) for number in order],
        **{**pipeline.defaults, "num_inference_steps": 2, "strength": 0.8},
    ).images
    for number, picture in zip(order, expected, strict=True):
        assert np.array_equal(pixels(answers[number]), np.asarray(picture))


@pytest.mark.parametrize(
    "family",
    [
        Family.FLUX2,
        Family.FLUX2_KLEIN_KV,
        Family.QWEN_IMAGE_21,
        Family.QWEN_IMAGE_EDIT,
        Family.QWEN_IMAGE_EDIT_PLUS,
    ],
)
def test_a_family_that_diffusers_does_not_inpaint_with_is_refused(
    family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    with pytest.raises(
        ValueError, match=f"has no inpainting pipeline for {family} that takes a size; it has"
    ):
        Pipeline(str(tiny_checkpoint(family)), torch.device("cpu"), torch.float32)


async def test_what_is_not_said_is_as_giornata_serves_the_model() -> None:
    card = read_model_card(TRAINED)
    defaults = Pipeline(str(TRAINED), torch.device("cpu"), torch.float32).defaults
    assert defaults["num_inference_steps"] == card.default_steps
    assert defaults["guidance_scale"] == card.default_guidance_scale


def stable_diffusion(folder: Path) -> None:
    """A tiny checkpoint of a family that Giornata does not serve."""
    torch.manual_seed(0)
    kind: Any = UNet2DConditionModel
    unet = kind(
        sample_size=64,
        in_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    coder: Any = AutoencoderKL
    vae = coder(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=len(clip_tokenizer()),
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    pipeline: Any = StableDiffusionInpaintPipeline
    made = pipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(folder, safe_serialization=True)


@pytest.mark.filterwarnings("ignore")  # diffusers imports every pipeline it has, and some of those warn
async def test_other_families_are_served_by_the_pipeline_that_diffusers_finds(tmp_path: Path) -> None:
    stable_diffusion(tmp_path / "tiny")
    pipeline = Pipeline(str(tmp_path / "tiny"), torch.device("cpu"), torch.float32)
    async with served(pipeline, BatchPolicy(2, FOREVER_S)) as http:
        status, body = await edited(http, n="2", num_inference_steps="2")
    assert (status, body["size"], pipeline.defaults) == (200, "64x48", {})
    assert not np.array_equal(pixels(body, 0), pixels(body, 1))
