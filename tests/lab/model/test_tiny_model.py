"""Checkpoints with random weights are like any other: they load, run, tell their parts apart and are built alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import FluxTransformer2DModel

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_lab.model.random.build import build

TEXT_TOKENS = 48
CLIP_TOKENS = 77
PICTURE_TOKENS = 36**2
"""Tokens of a picture of 1024² pixels in a prompt of Qwen-Image-Edit, which has 28² pixels a token."""
SMALL_PICTURE_TOKENS = 200
"""Those of one of 384² pixels, as the checkpoints for several pictures see them, and of its number."""
LENGTHS = {
    Family.SD3: TEXT_TOKENS + CLIP_TOKENS,
    Family.QWEN_IMAGE_EDIT: TEXT_TOKENS + PICTURE_TOKENS,
    Family.QWEN_IMAGE_EDIT_PLUS: TEXT_TOKENS + 5 * SMALL_PICTURE_TOKENS,
} | dict.fromkeys((Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT), CLIP_TOKENS)
"""Text tokens of a prompt, where they are not :data:`TEXT_TOKENS`."""


@pytest.fixture(scope="module", params=list(Family))
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.fixture(scope="module")
def folder(family: Family, tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(family)


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("of", [Family.SDXL, Family.QWEN_IMAGE_EDIT])
def test_equal_seeds_give_equal_bytes(
    of: Family, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    torch.manual_seed(1234)
    before = torch.random.get_rng_state()
    build(of, tmp_path / "again", seed=0)
    assert _hashes(tmp_path / "again") == _hashes(tiny_checkpoint(of))
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random state was disturbed"


def test_another_seed_gives_other_weights_alone(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    build(Family.FLUX_FILL, tmp_path / "other", seed=1)
    these, other = _hashes(tiny_checkpoint(Family.FLUX_FILL)), _hashes(tmp_path / "other")
    assert {name for name in these if these[name] != other[name]} == {
        name for name in these if name.endswith(".safetensors")
    }


def test_it_is_small_and_says_what_it_is(family: Family, folder: Path) -> None:
    card = read_model_card(folder)
    assert card.family == family
    factor = 16 if family is Family.QWEN_IMAGE_21 else 8
    assert (card.vae_scale_factor, card.max_text_tokens) == (factor, LENGTHS.get(family, TEXT_TOKENS))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10 << 20


def test_a_token_depends_on_the_others(tiny_checkpoint: Callable[[Family], Path]) -> None:
    folder, kind, tokens = tiny_checkpoint(Family.FLUX_INPAINT), cast("Any", FluxTransformer2DModel), 64
    transformer = kind.from_pretrained(folder, subfolder="transformer")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, transformer.config.in_channels, generator=generator)
    others = torch.randn(1, tokens, transformer.config.in_channels, generator=generator)
    others[:, :8] = hidden[:, :8]
    constant = {
        "encoder_hidden_states": torch.randn(
            1, 48, transformer.config.joint_attention_dim, generator=generator
        ),
        "pooled_projections": torch.randn(1, transformer.config.pooled_projection_dim, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([7.0]),
        "txt_ids": torch.zeros(48, 3),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
    }
    with torch.no_grad():
        velocity = transformer(hidden_states=hidden, **constant).sample[:, :8]
        moved = transformer(hidden_states=others, **constant).sample[:, :8]
    assert (moved - velocity).norm() / velocity.norm() > 0.3
