"""Shapes of what Flux encodes, and what it does not decode; that it is diffusers' is seen in the conformance suite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from giornata.families import Family
from giornata.tensors import PROMPT_MASK, padding_tokens
from giornata.wire.errors import RowPoisoned
from giornata.wire.models import ModelCard
from giornata_prepost.families.flow_transformers import FluxImages
from giornata_prepost.images.geometry import Size

SIZE = Size(64, 48)
SEEDS = (7, 8)
PROMPT = "a red dress"


def _picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (SIZE.height, SIZE.width, 3), np.uint8)


def _mask() -> np.ndarray[Any, np.dtype[np.uint8]]:
    mask = np.zeros((SIZE.height, SIZE.width), np.uint8)
    mask[5:30, 10:41] = 255
    return mask


def test_shapes_are_those_of_the_contract(model: FluxImages, card: ModelCard) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    tokens, packed = SIZE.pixels // card.pixel_multiple**2, 4 * card.latent_channels
    expected = {"noise": (tokens, packed), "image_latents": (tokens, packed)}
    if card.family == Family.FLUX_FILL:
        expected |= {"masked_image_latents": (tokens, packed), "mask": (tokens, 4 * card.vae_scale_factor**2)}
    else:
        expected |= {"mask": (tokens, packed)}
    assert {name: tuple(tensor.shape) for name, tensor in row.items()} == expected
    text = model.encode_text(PROMPT, SIZE)
    assert text["prompt_embeds"].shape == (card.max_text_tokens, 32)
    assert text["pooled_prompt_embeds"].ndim == 1
    assert text[PROMPT_MASK].shape == (card.max_text_tokens,)
    assert padding_tokens(text[PROMPT_MASK]) < padding_tokens(model.encode_text("", SIZE)[PROMPT_MASK])


def test_the_pictures_grid_is_not_transposed(model: FluxImages) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    assert model.decode(row["image_latents"], SIZE).shape == (SIZE.height, SIZE.width, 3)


def test_latents_that_are_not_finite_are_poison(model: FluxImages) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    row["noise"][3, 3] = torch.nan
    with pytest.raises(RowPoisoned):
        model.decode(row["noise"], SIZE)


def test_the_transformer_is_not_loaded(model: FluxImages) -> None:
    assert model.pipeline.transformer is None
