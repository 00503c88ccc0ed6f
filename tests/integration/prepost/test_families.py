"""Every family prepares what diffusers' own pipeline prepares of the same edit and seed, and decodes as it does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from torch import Tensor

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.tensors import PROMPT_MASK
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import cfg_scale, resolve
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ImageModel, Tensors, rehearse
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import PixelLimits, inspect
from tests.integration.prepost.asking import png
from tests.integration.prepost.oracle import (
    HALVES,
    NEGATIVE,
    PROMPT,
    SIZE,
    UNETS,
    Caught,
    Oracle,
    mask,
    picture,
)

CPU = torch.device("cpu")
SEED = 7
NINE = {Family.SD_INPAINT, Family.SDXL_INPAINT}
MODES = {Family.FLUX2_KLEIN, Family.FLUX_KONTEXT}
"""Families whose pipelines take the mode of the picture's posterior."""


@pytest.fixture(scope="module", params=sorted(HALVES), ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.fixture(scope="module")
def folder(family: Family, tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(family)


@pytest.fixture(scope="module")
def card(folder: Path) -> ModelCard:
    return read_model_card(folder)


@pytest.fixture(scope="module")
def model(folder: Path, card: ModelCard) -> ImageModel:
    return FAMILIES[card.family](folder, card, CPU, torch.float32)


@pytest.fixture(scope="module")
def oracle(family: Family, folder: Path) -> Oracle:
    return Oracle(family, folder)


@pytest.fixture(scope="module")
def caught(oracle: Oracle) -> Caught:
    return oracle.run(SEED)


def tokens(latents: Tensor, side: int) -> Tensor:
    """(1, channels, h, w) cut into tokens one by one; latents that the pipeline has packed are tokens already."""
    if latents.ndim == 3:
        return latents[0]
    height, width = latents.shape[-2:]
    corners = [(y, x) for y in range(0, height, side) for x in range(0, width, side)]
    return torch.stack([latents[0, :, y : y + side, x : x + side].flatten() for y, x in corners])


def rows_of(model: ImageModel, *, strength: float = 1.0) -> Tensors:
    draws = model.card.keeps_whole_steps  # as samplers of discrete times may
    (row,) = model.encode_rows(picture(), mask(), [SEED], draws=draws, strength=strength)
    return row


def expected_row(found: Caught, family: Family, card: ModelCard) -> Tensors:
    """By the names of prepost; of doubled batches, one half."""
    side = card.token_latents
    expected = {"noise": tokens(found.prepared[1], side)}
    if family in NINE:
        expected["mask"] = tokens(found.masked[0][:1], side)
        expected["masked_image_latents"] = tokens(found.masked[1][:1], side)
    else:
        expected["image_latents"] = tokens(found.prepared[2], side)
        channels = expected["noise"].shape[1] // side**2
        plain = found.masked[0][:1]
        repeated = plain.expand(-1, channels, -1, -1) if plain.ndim == 4 else plain
        expected["mask"] = tokens(repeated, side).expand_as(expected["noise"])
    if family in UNETS:
        assert found.generator is not None
        expected["generator"] = found.generator
    return expected


def assert_equal(made: Tensors, expected: Tensors) -> None:
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5, msg=name)


def without_masks(text: Tensors) -> Tensors:
    """What the network is told of an encoding: Flux's holds the mask of its prompt, too."""
    return {name: tensor for name, tensor in text.items() if not name.endswith(PROMPT_MASK)}


def test_a_row_is_what_the_pipeline_prepares(
    model: ImageModel, family: Family, card: ModelCard, caught: Caught
) -> None:
    row = rows_of(model)
    if family in NINE:
        row.pop("image_latents")  # at full strength the pipeline makes none
    assert_equal(row, expected_row(caught, family, card))
    assert 0 < row["mask"].mean() < 1


def test_text_is_what_the_network_first_gets(model: ImageModel, family: Family, caught: Caught) -> None:
    guided, unguided = caught.halves
    negative = None if family is Family.FLUX2_KLEIN else NEGATIVE
    assert_equal(without_masks(model.encode_text(PROMPT, SIZE)), guided)
    expected = {f"negative_{name}": tensor for name, tensor in unguided.items()}
    assert_equal(without_masks(model.encode_unguided(negative, SIZE)), expected)
    assert not torch.equal(unguided["prompt_embeds"], guided["prompt_embeds"])


def test_text_tokens_are_those_that_pass_the_blocks(model: ImageModel, family: Family) -> None:
    text = model.encode_text(PROMPT, SIZE)
    own = len(text["prompt_embeds"])
    expected = 0 if family in UNETS else own + -own % 32 if family is Family.Z_IMAGE else own
    assert model.text_tokens(text) == expected


def test_decoding_is_the_pipelines(model: ImageModel, card: ModelCard, caught: Caught) -> None:
    assert caught.latents is not None
    assert caught.picture is not None
    painted = model.decode(tokens(caught.latents, card.token_latents), SIZE)
    assert painted.shape == (SIZE.height, SIZE.width, 3)
    assert np.abs(painted.astype(int) - caught.picture.astype(int)).max() <= 1
    assert painted.std() > 5


def test_the_compute_set_is_what_the_mask_touches(model: ImageModel, card: ModelCard) -> None:
    """A strip of one pixel too: no family loses it between its cells."""
    marked = np.zeros((2 * SIZE.height, 2 * SIZE.width), np.uint8)
    marked[40:71, 25:27] = 255
    marked[100, 200:] = 255
    scene = np.random.default_rng(2).integers(0, 256, (*marked.shape, 3), np.uint8)
    found = inspect(
        png(scene), png(marked), EditParameters(prompt="x", mask_blur=0), card, PixelLimits(1 << 20, 1 << 20)
    )
    prepared = load(found.prepared)
    (row,) = model.encode_rows(prepared["image"], prepared["mask"], [0])
    touched = row["mask"].amax(dim=1) > 0
    assert found.compute_tokens == int(touched.sum()) < found.tokens


def test_it_rehearses(model: ImageModel) -> None:
    rehearse(model)


@pytest.mark.parametrize("nine", sorted(NINE))
def test_below_full_strength_a_unet_of_nine_channels_encodes_the_picture_first(
    nine: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    folder = tiny_checkpoint(nine)
    card = read_model_card(folder)
    found = Oracle(nine, folder).run(SEED, strength=0.9)
    row = rows_of(FAMILIES[nine](folder, card, CPU, torch.float32), strength=0.9)
    row.pop("image_latents")
    assert_equal(row, expected_row(found, nine, card))


@pytest.mark.parametrize(
    ("family", "asked", "guided"),
    [
        (Family.SD, {"guidance_scale": 1.0}, False),
        (Family.SD, {"guidance_scale": 1.1}, True),
        (Family.Z_IMAGE, {"guidance_scale": 0.0}, False),
        (Family.Z_IMAGE, {"guidance_scale": 0.5}, True),
        (Family.QWEN_IMAGE, {"true_cfg_scale": 1.0}, False),
        (Family.QWEN_IMAGE, {}, True),
        (Family.CHROMA, {"guidance_scale": 1.0}, False),
    ],
    indirect=["family"],
)
def test_the_unguided_half_is_computed_where_the_pipeline_computes_it(
    oracle: Oracle, card: ModelCard, asked: dict[str, Any], guided: bool
) -> None:
    halves = oracle.run(SEED, **asked).halves
    assert len(halves) == 1 + guided
    negative = {"negative_prompt": NEGATIVE} if guided else {}
    parameters = resolve(EditParameters.model_validate({"prompt": PROMPT} | asked | negative), card, 1)
    assert (cfg_scale(parameters, card) is not None) == guided


def test_sdxl_guides_away_from_zeros_where_no_negative_prompt_is_given(
    tiny_checkpoint: Callable[[Family], Path],
) -> None:
    folder = tiny_checkpoint(Family.SDXL)
    model = FAMILIES[Family.SDXL](folder, read_model_card(folder), CPU, torch.float32)
    unasked, asked = model.encode_unguided(None, SIZE), model.encode_unguided("", SIZE)
    _, half = Oracle(Family.SDXL, folder).run(SEED, negative_prompt=None).halves
    assert_equal(unasked, {f"negative_{name}": tensor for name, tensor in half.items()})
    assert not unasked["negative_prompt_embeds"].any()
    assert asked["negative_prompt_embeds"].any()
    other = model.encode_unguided(None, Size(64, 128))["negative_add_time_ids"]
    assert other.tolist() == [128, 64, 0, 0, 128, 64]


def test_sd3_is_served_without_its_third_encoder(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint(Family.SD3), tmp_path / "sd3")
    shutil.rmtree(folder / "text_encoder_3")
    guided, _ = Oracle(Family.SD3, folder, text_encoder_3=None).run(SEED).halves
    model = FAMILIES[Family.SD3](folder, read_model_card(folder), CPU, torch.float32)
    assert_equal(model.encode_text(PROMPT, SIZE), guided)
