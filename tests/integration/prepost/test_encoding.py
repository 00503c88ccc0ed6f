"""Encoding and decoding equal what diffusers' own pipeline computes of the same edit and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline
from PIL import Image

from giornata.families import Family
from giornata.tensors import PROMPT_MASK, padding_tokens
from giornata.wire.errors import RowPoisoned
from giornata.wire.models import ModelCard
from giornata_prepost.families.flux import FluxImages
from giornata_prepost.families.protocol import Tensors
from giornata_prepost.images.geometry import Size

SIZE = Size(64, 48)
SEEDS = (7, 8)
PROMPT = "a red dress"
NEGATIVE = "blurry"
ORACLES: dict[str, Any] = {Family.FLUX_INPAINT: FluxInpaintPipeline, Family.FLUX_FILL: FluxFillPipeline}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path, card: ModelCard) -> Any:
    pipeline = ORACLES[card.family].from_pretrained(checkpoint, use_safetensors=True, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (SIZE.height, SIZE.width, 3), np.uint8)


def _mask() -> np.ndarray[Any, np.dtype[np.uint8]]:
    mask = np.zeros((SIZE.height, SIZE.width), np.uint8)
    mask[5:30, 10:41] = 255
    return mask


def _run_oracle(oracle: Any, family: str, seed: int, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "prompt": PROMPT,
        "image": Image.fromarray(_picture()),
        "mask_image": Image.fromarray(_mask()),
        "width": SIZE.width,
        "height": SIZE.height,
        "num_inference_steps": 2,
        "strength": 1.0,
        "max_sequence_length": 48,
        "generator": torch.Generator().manual_seed(seed),
    }
    if family == Family.FLUX_INPAINT:
        arguments |= {"negative_prompt": NEGATIVE, "true_cfg_scale": 2.0}
    return oracle(**arguments, **options)


def _what_the_oracle_prepares(
    oracle: Any, family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Tensors:
    """Tensors of a real call of the pipeline: results of its methods, and the transformer's arguments."""
    found: Tensors = {}
    prepare_latents, prepare_mask_latents, forward = (
        oracle.prepare_latents, oracle.prepare_mask_latents, oracle.transformer.forward
    )  # fmt: skip

    def spy_latents(*args: Any) -> Any:
        result = prepare_latents(*args)
        found.update(
            zip(("latents", "noise", "image_latents"), result, strict=False)
            if len(result) == 4
            else {"noise": result[0]}
        )
        return result

    def spy_mask(*args: Any) -> Any:
        mask, masked = prepare_mask_latents(*args)
        found["generator"] = args[-1].get_state().unsqueeze(0)
        found.update(
            {"mask": mask} | ({"masked_image_latents": masked} if family == Family.FLUX_FILL else {})
        )
        return mask, masked

    def spy_forward(**arguments: Any) -> Any:
        prefix = "negative_" if "prompt_embeds" in found else ""
        found.setdefault(f"{prefix}prompt_embeds", arguments["encoder_hidden_states"])
        found.setdefault(f"{prefix}pooled_prompt_embeds", arguments["pooled_projections"])
        return forward(**arguments)

    encoder, pad = oracle.text_encoder_2.forward, oracle.tokenizer_2.pad_token_id

    def spy_encoder(input_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
        prefix = "negative_" if PROMPT_MASK in found else ""
        found[f"{prefix}{PROMPT_MASK}"] = (input_ids != pad).to(torch.uint8)
        return encoder(input_ids, *args, **named)

    monkeypatch.setattr(oracle.text_encoder_2, "forward", spy_encoder)
    monkeypatch.setattr(oracle, "prepare_latents", spy_latents)
    monkeypatch.setattr(oracle, "prepare_mask_latents", spy_mask)
    monkeypatch.setattr(oracle.transformer, "forward", spy_forward)
    _run_oracle(oracle, family, seed)
    monkeypatch.undo()
    found.pop("latents", None)
    return {name: tensor[0] for name, tensor in found.items()}


def test_rows_equal_what_the_pipeline_prepares(
    model: FluxImages, oracle: Any, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(model.encode_rows(_picture(), _mask(), SEEDS, draws=True))
    text = model.encode_text(PROMPT, SIZE)
    if card.takes_true_cfg:
        text |= model.encode_unguided(NEGATIVE, SIZE)
    assert len(rows) == len(SEEDS)
    for seed, row in zip(SEEDS, rows, strict=True):
        expected = _what_the_oracle_prepares(oracle, card.family, seed, monkeypatch)
        if not card.takes_true_cfg:
            expected = {name: tensor for name, tensor in expected.items() if not name.startswith("negative_")}
        made = row | text
        if "image_latents" not in expected:  # Fill keeps its template's latents to itself
            made = {name: tensor for name, tensor in made.items() if name != "image_latents"}
        assert made.keys() == expected.keys()
        for name, tensor in made.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


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
    assert text["pooled_prompt_embeds"].shape == (32,)
    assert text[PROMPT_MASK].shape == (card.max_text_tokens,)
    assert padding_tokens(text[PROMPT_MASK]) < padding_tokens(model.encode_text("", SIZE)[PROMPT_MASK])


def test_image_latents_are_what_strength_below_one_starts_from(
    model: FluxImages, oracle: Any, card: ModelCard
) -> None:
    """Both families mix noise and template in their first latents; that exposes Fill's image latents too."""
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    oracle.scheduler.set_timesteps(sigmas=[0.5], mu=0.7)
    sigma = oracle.scheduler.sigmas[0]
    picture = oracle.image_processor.preprocess(Image.fromarray(_picture()))
    with torch.no_grad():
        latents = oracle.prepare_latents(
            picture, oracle.scheduler.timesteps[:1], 1, card.latent_channels, SIZE.height, SIZE.width,
            torch.float32, CPU, torch.Generator().manual_seed(SEEDS[0]),
        )[0][0]  # fmt: skip
    torch.testing.assert_close(
        sigma * row["noise"] + (1 - sigma) * row["image_latents"], latents, rtol=0, atol=1e-6
    )


def test_decoding_equals_the_pipelines(model: FluxImages, oracle: Any, card: ModelCard) -> None:
    latents = _run_oracle(oracle, card.family, 3, output_type="latent").images
    expected = np.asarray(_run_oracle(oracle, card.family, 3).images[0])
    decoded = model.decode(latents[0], SIZE)
    assert decoded.dtype == np.uint8
    assert np.abs(decoded.astype(int) - expected.astype(int)).max() <= 1


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
