"""Tiny checkpoints of every family, and what prepost opens of them."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire.models import ModelCard
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ImageModel
from tests.shared_files import SharedFolders


def _clip() -> tuple[CLIPTokenizer, CLIPTextModel]:
    letters = list(string.printable.strip())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, CLIPTextModel(config).eval()


def _t5() -> tuple[T5TokenizerFast, T5EncoderModel]:
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    vocabulary += [(letter, -6.0) for letter in string.printable.strip()]
    tokenizer = T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=48)
    config = T5Config(
        vocab_size=len(vocabulary), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return tokenizer, T5EncoderModel(config).eval()


def _components(family: Family, latent_channels: int) -> dict[str, Any]:
    tokenizer, text_encoder = _clip()
    tokenizer_2, text_encoder_2 = _t5()
    packed = 4 * latent_channels
    vae = AutoencoderKL(
        latent_channels=latent_channels,
        block_out_channels=[8, 16, 16, 16],
        layers_per_block=1,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=packed if family is Family.FLUX_INPAINT else 2 * packed + 256,
        out_channels=packed,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae.eval(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": tokenizer_2,
        "transformer": transformer.eval(),
    }


@pytest.fixture(
    scope="module", params=[(Family.FLUX_INPAINT, 16), (Family.FLUX_FILL, 16), (Family.FLUX_FILL, 8)], ids=str
)
def checkpoint(request: pytest.FixtureRequest, shared_folders: SharedFolders) -> Path:
    family, latent_channels = request.param
    return shared_folders.folder(f"flux-{family}-{latent_channels}", partial(_save, family, latent_channels))


def _save(family: Family, latent_channels: int, folder: Path) -> None:
    torch.manual_seed(0)
    pipeline = FluxPipeline if family is Family.FLUX_INPAINT else FluxFillPipeline
    pipeline(**_components(family, latent_channels)).save_pretrained(folder)


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return read_model_card(checkpoint, "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path, card: ModelCard) -> ImageModel:
    return FAMILIES[card.family](checkpoint, card, torch.device("cpu"), torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blobs(redis_url: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(redis_url) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as connected:
        yield connected
