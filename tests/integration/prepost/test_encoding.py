"""Encoding and decoding equal what diffusers' own pipeline computes of the same edit and seed."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from giornata.wire.errors import RowPoisoned
from giornata.wire.models import Family, ModelCard, read_model_card
from giornata_prepost.encoding import ImageModel, Tensors
from giornata_prepost.geometry import Size

SIZE = Size(64, 48)
SEEDS = (7, 8)
PROMPT = "a red dress"
NEGATIVE = "blurry"
ORACLES: dict[Family, Any] = {Family.FLUX_INPAINT: FluxInpaintPipeline, Family.FLUX_FILL: FluxFillPipeline}
CPU = torch.device("cpu")


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
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, latent_channels = request.param
    torch.manual_seed(0)
    pipeline = FluxPipeline if family is Family.FLUX_INPAINT else FluxFillPipeline
    folder = tmp_path_factory.mktemp("checkpoint")
    pipeline(**_components(family, latent_channels)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return read_model_card(checkpoint, "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path, card: ModelCard) -> ImageModel:
    return ImageModel(checkpoint, card, CPU, torch.float32)


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


def _run_oracle(oracle: Any, family: Family, seed: int, **options: Any) -> Any:
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
    if family is Family.FLUX_INPAINT:
        arguments |= {"negative_prompt": NEGATIVE, "true_cfg_scale": 2.0}
    return oracle(**arguments, **options)


def _what_the_oracle_prepares(
    oracle: Any, family: Family, seed: int, monkeypatch: pytest.MonkeyPatch
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
        found.update(
            {"mask": mask} | ({"masked_image_latents": masked} if family is Family.FLUX_FILL else {})
        )
        return mask, masked

    def spy_forward(**arguments: Any) -> Any:
        prefix = "negative_" if "prompt_embeds" in found else ""
        found.setdefault(f"{prefix}prompt_embeds", arguments["encoder_hidden_states"])
        found.setdefault(f"{prefix}pooled_prompt_embeds", arguments["pooled_projections"])
        return forward(**arguments)

    monkeypatch.setattr(oracle, "prepare_latents", spy_latents)
    monkeypatch.setattr(oracle, "prepare_mask_latents", spy_mask)
    monkeypatch.setattr(oracle.transformer, "forward", spy_forward)
    _run_oracle(oracle, family, seed)
    monkeypatch.undo()
    found.pop("latents", None)
    return {name: tensor[0] for name, tensor in found.items()}


def test_rows_equal_what_the_pipeline_prepares(
    model: ImageModel, oracle: Any, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(model.encode_rows(_picture(), _mask(), SEEDS))
    text = model.encode_text(PROMPT, NEGATIVE if card.takes_true_cfg else None)
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


def test_shapes_are_those_of_the_contract(model: ImageModel, card: ModelCard) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    tokens, packed = SIZE.pixels // card.pixel_multiple**2, 4 * card.latent_channels
    expected = {"noise": (tokens, packed), "image_latents": (tokens, packed)}
    if card.family is Family.FLUX_FILL:
        expected |= {"masked_image_latents": (tokens, packed), "mask": (tokens, 4 * card.vae_scale_factor**2)}
    else:
        expected |= {"mask": (tokens, packed)}
    assert {name: tuple(tensor.shape) for name, tensor in row.items()} == expected
    text = model.encode_text(PROMPT)
    assert text["prompt_embeds"].shape == (card.max_text_tokens, 32)
    assert text["pooled_prompt_embeds"].shape == (32,)


def test_image_latents_are_what_strength_below_one_starts_from(
    model: ImageModel, oracle: Any, card: ModelCard
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


def test_decoding_equals_the_pipelines(model: ImageModel, oracle: Any, card: ModelCard) -> None:
    latents = _run_oracle(oracle, card.family, 3, output_type="latent").images
    expected = np.asarray(_run_oracle(oracle, card.family, 3).images[0])
    decoded = model.decode(latents[0], SIZE)
    assert decoded.dtype == np.uint8
    assert np.abs(decoded.astype(int) - expected.astype(int)).max() <= 1


def test_the_pictures_grid_is_not_transposed(model: ImageModel) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    assert model.decode(row["image_latents"], SIZE).shape == (SIZE.height, SIZE.width, 3)


def test_latents_that_are_not_finite_are_poison(model: ImageModel) -> None:
    row = next(model.encode_rows(_picture(), _mask(), SEEDS))
    row["noise"][3, 3] = torch.nan
    with pytest.raises(RowPoisoned):
        model.decode(row["noise"], SIZE)


def test_the_transformer_is_not_loaded(model: ImageModel) -> None:
    assert model.pipeline.transformer is None
