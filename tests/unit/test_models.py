"""Model cards: what a checkpoint's folder says, and a digest that notices every change."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from giornata.families import KINDS, Family, Kind
from giornata.model_cards import SAMPLE_BYTES, SERVING, digest, level_bytes, read_model_card
from giornata.wire.models import Guidance, Task
from giornata.wire.samplers import DISCRETE_TIME


def checkpoint(
    folder: Path, pipeline: str = "FluxFillPipeline", *, guidance: bool = True, text_length: object = 48
) -> Path:
    """The JSON files of a checkpoint and weight files of a few bytes."""
    files: dict[str, dict[str, Any]] = {
        "model_index.json": {"_class_name": pipeline},
        "transformer/config.json": {"guidance_embeds": guidance},
        "vae/config.json": {"block_out_channels": [8, 16, 16, 16], "latent_channels": 16},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": text_length},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "transformer" / "weights.safetensors").write_bytes(bytes(range(256)) * 16384)
    return folder


def test_a_fill_checkpoint(tmp_path: Path) -> None:
    card = read_model_card(checkpoint(tmp_path / "fill"))
    assert (card.name, card.family) == ("fill", Family.FLUX_FILL)
    assert (card.vae_scale_factor, card.pixel_multiple, card.latent_channels, card.mask_grain) == (
        8,
        16,
        16,
        1,
    )
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (50, 30.0, 1.0)
    assert not card.takes_true_cfg


@pytest.mark.parametrize("pipeline", ["FluxPipeline", "FluxInpaintPipeline", "FluxImg2ImgPipeline"])
def test_a_text_to_image_checkpoint_edits_as_inpainting_does(tmp_path: Path, pipeline: str) -> None:
    card = read_model_card(checkpoint(tmp_path, pipeline), "named")
    assert (card.name, card.family, card.default_strength) == ("named", Family.FLUX_INPAINT, 0.6)
    assert card.takes_true_cfg
    assert card.mask_grain == 8, "it tells edited from kept by whole latent pixels"


def test_a_timestep_distilled_checkpoint_takes_no_guidance_and_few_steps(tmp_path: Path) -> None:
    card = read_model_card(checkpoint(tmp_path, "FluxPipeline", guidance=False))
    assert (card.takes_guidance, card.default_steps) == (False, 4)


@pytest.mark.parametrize(("written", "length"), [(48, 48), (512, 512), (int(1e30), 512)])
def test_text_is_padded_as_the_tokenizer_says_and_to_512_at_most(
    tmp_path: Path, written: int, length: int
) -> None:
    assert read_model_card(checkpoint(tmp_path, text_length=written)).max_text_tokens == length


def test_another_pipeline_is_refused_with_those_that_are_served(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"HunyuanDiTPipeline; served are: FluxPipeline"):
        read_model_card(checkpoint(tmp_path, "HunyuanDiTPipeline"))


def test_a_family_more_is_a_row_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Kind(
        "toy", takes_true_cfg=True, steps=9, guidance_scale=5.0, strength=0.5, token_latents=1,
        network="unet", tokenizer="tokenizer", max_text_tokens=77,
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "ToyPipeline", toy)
    folder = checkpoint(tmp_path, "ToyPipeline")
    (folder / "transformer").rename(folder / "unet")
    (folder / "tokenizer_2").rename(folder / "tokenizer")
    card = read_model_card(folder)
    assert (card.family, card.pixel_multiple, card.max_text_tokens) == ("toy", 8, 48)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (9, 5.0, 0.5)


def test_the_default_sampler_is_the_checkpoints_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Kind(
        "timed", takes_true_cfg=True, steps=9, guidance_scale=5.0, strength=0.5, samplers=DISCRETE_TIME
    )
    monkeypatch.setitem(KINDS, "TimedPipeline", timed)
    folder = checkpoint(tmp_path, "TimedPipeline")
    (folder / "scheduler").mkdir(exist_ok=True)
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text('{"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": true}')
    card = read_model_card(folder)
    assert (card.samplers, card.default_sampler, card.keeps_whole_steps) == (
        DISCRETE_TIME,
        "dpmpp_2m_karras",
        True,
    )
    config.write_text('{"_class_name": "KDPM2DiscreteScheduler"}')
    with pytest.raises(
        ValueError, match="KDPM2DiscreteScheduler with its defaults is not served; served are"
    ):
        read_model_card(folder)


UNET: dict[str, Any] = {
    "in_channels": 4,
    "sample_size": 96,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}
SDXL_UNET: dict[str, Any] = {
    "in_channels": 4,
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
    "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "addition_embed_type": "text_time",
}


def other(
    folder: Path,
    pipeline: str,
    network: dict[str, Any],
    *,
    index: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    tokenizer: str = "tokenizer",
    length: int = 77,
) -> Path:
    """The JSON files of a checkpoint of another family than Flux."""
    part = "unet" if "block_out_channels" in network else "transformer"
    files: dict[str, dict[str, Any]] = {
        "model_index.json": {"_class_name": pipeline} | (index or {}),
        f"{part}/config.json": network,
        "scheduler/scheduler_config.json": {"_class_name": "EulerDiscreteScheduler"} | (scheduler or {}),
        "vae/config.json": vae or {"block_out_channels": [8, 16, 16, 16], "latent_channels": 4},
        f"{tokenizer}/tokenizer_config.json": {"model_max_length": length},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_unets_card_is_that_of_its_tiles(tmp_path: Path) -> None:
    folder = other(tmp_path / "sd", "StableDiffusionPipeline", UNET)
    card = read_model_card(folder)
    assert (card.family, card.pixel_multiple, card.mask_grain, card.native_size) == (Family.SD, 64, 8, 768)
    assert (card.guidance, card.guided_above) == (Guidance.CLASSIFIER_FREE, 1.0)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (50, 7.5, 1.0)
    # keys and values of 16 self-attentions: 5 of 96² cells, 5 of 48², 5 of 24² and 1 of 12², in 4 bits
    cells = 5 * (320 * 96**2 + 640 * 48**2 + 1280 * 24**2) + 1280 * 12**2
    # by decision record 0034 at 512²: 46 MB of keys and values, 44 of borders, and 1 of moments
    assert level_bytes(folder, card, 16) == pytest.approx(4 * cells + 2.25 * 45.1e6, rel=0.01)
    folder = other(tmp_path / "xl", "StableDiffusionXLPipeline", SDXL_UNET)
    xl = read_model_card(folder)
    # as there, at 1024²: 420 MB of keys and values, 244 of borders, 12 of moments
    assert level_bytes(folder, xl, 16) == pytest.approx(676e6, rel=0.01)
    assert (xl.family, xl.pixel_multiple, xl.native_size, xl.default_strength) == (
        Family.SDXL,
        32,
        1024,
        0.9999,
    )


@pytest.mark.parametrize(
    ("pipeline", "network", "family"),
    [
        ("StableDiffusionPipeline", UNET, Family.SD_INPAINT),
        ("StableDiffusionXLInpaintPipeline", SDXL_UNET, Family.SDXL_INPAINT),
    ],
)
def test_nine_input_channels_make_another_family_which_generates_nothing(
    tmp_path: Path, pipeline: str, network: dict[str, Any], family: Family
) -> None:
    card = read_model_card(other(tmp_path, pipeline, network | {"in_channels": 9}))
    assert (card.family, card.tasks, card.generation_guidance_scale) == (family, (Task.EDIT,), None)


@pytest.mark.parametrize(
    ("pipeline", "network", "scale"),
    [("StableDiffusionInpaintPipeline", UNET, 7.5), ("StableDiffusionXLPipeline", SDXL_UNET, 5.0)],
)
def test_a_plain_unet_generates_whatever_pipeline_its_folder_names(
    tmp_path: Path, pipeline: str, network: dict[str, Any], scale: float
) -> None:
    card = read_model_card(other(tmp_path, pipeline, network))
    assert card.tasks == (Task.EDIT, Task.GENERATE)
    assert card.generation_guidance_scale == scale


@pytest.mark.parametrize(
    ("pipeline", "network", "told", "reason"),
    [
        ("StableDiffusionPipeline", {"in_channels": 8}, {}, "8 input channels; served are 4 and 9"),
        (
            "StableDiffusionPipeline",
            {"time_cond_proj_dim": 256},
            {},
            "time_cond_proj_dim 256; served is None",
        ),
        ("StableDiffusionPipeline", {"addition_embed_type": "text"}, {}, "addition_embed_type text"),
        ("StableDiffusionPipeline", {"block_out_channels": [32] * 5}, {}, "5 levels; served are 4"),
        ("StableDiffusionPipeline", {}, {"scheduler": {"thresholding": True}}, "asks for thresholding"),
        ("StableDiffusionPipeline", {}, {"scheduler": {"clip_sample": True}}, "asks for clip_sample"),
        ("StableDiffusionXLPipeline", {}, {}, "addition_embed_type None; served is text_time"),
        ("StableDiffusionXLPipeline", {}, {"index": {"requires_aesthetics_score": True}}, "a refiner"),
        ("StableDiffusionXLPipeline", {}, {"vae": {"latents_mean": [0.0]}}, "latents_mean"),
    ],
)
def test_a_variant_that_is_not_served_is_refused_with_its_reason(
    tmp_path: Path, pipeline: str, network: dict[str, Any], told: dict[str, Any], reason: str
) -> None:
    vae = {"block_out_channels": [8] * 4, "latent_channels": 4} | told.pop("vae", {})
    folder = other(tmp_path, pipeline, UNET | network, vae=vae, **told)
    with pytest.raises(ValueError, match=f"cannot be served: .*{reason}"):
        read_model_card(folder)


def test_sd3_takes_the_tokens_of_both_kinds_of_encoders_and_16_channels_alone(tmp_path: Path) -> None:
    network = {"in_channels": 16, "sample_size": 128}
    of = partial(other, pipeline="StableDiffusion3Pipeline", tokenizer="tokenizer_3", length=512)
    card = read_model_card(of(tmp_path / "a", network=network))
    assert (card.family, card.max_text_tokens, card.native_size, card.default_strength) == (
        Family.SD3, 256 + 77, 1024, 0.6
    )  # fmt: skip
    with pytest.raises(ValueError, match="33 input channels; served are 16"):
        read_model_card(of(tmp_path / "b", network=network | {"in_channels": 33}))


def test_a_distilled_klein_takes_few_steps_and_no_guidance(tmp_path: Path) -> None:
    of = partial(other, pipeline="Flux2KleinPipeline", network={"guidance_embeds": False})
    base, distilled = (
        read_model_card(of(tmp_path / str(told), index={"is_distilled": told})) for told in (False, True)
    )
    assert (base.guidance, base.default_steps, base.default_guidance_scale) == (
        Guidance.CLASSIFIER_FREE,
        50,
        8.0,
    )
    assert (distilled.guidance, distilled.default_steps) == (Guidance.NONE, 4)
    assert not distilled.takes_negative_prompt
    assert base.mask_grain == base.pixel_multiple == 16, "it blends by tokens"


def test_z_image_turbo_is_told_by_its_scheduler(tmp_path: Path) -> None:
    of = partial(other, pipeline="ZImagePipeline", network={})
    base, turbo = (read_model_card(of(tmp_path / str(s), scheduler={"shift": s})) for s in (6.0, 3.0))
    assert (base.default_steps, base.default_guidance_scale, base.guided_above) == (50, 5.0, 0.0)
    assert (turbo.default_steps, turbo.default_guidance_scale, turbo.guided_above) == (9, 0.0, 0.0)
    assert (base.generation_guidance_scale, turbo.generation_guidance_scale) == (5.0, 0.0)
    (tmp_path / "3.0" / SERVING).write_text('{"generation_guidance_scale": 2.0}')
    assert read_model_card(tmp_path / "3.0").generation_guidance_scale == 2.0


def test_qwens_autoencoder_is_read_by_its_own_names(tmp_path: Path) -> None:
    vae = {"temperal_downsample": [False, True, True], "z_dim": 16}
    folder = other(tmp_path, "QwenImagePipeline", {"guidance_embeds": False}, vae=vae, length=131_072)
    card = read_model_card(folder)
    assert (card.vae_scale_factor, card.latent_channels, card.max_text_tokens) == (8, 16, 512)
    assert (card.takes_guidance, card.takes_true_cfg, card.default_true_cfg_scale) == (False, True, 4.0)
    (folder / "vae" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not an AutoencoderKLQwenImage of diffusers"):
        read_model_card(folder)


def test_serving_json_tells_other_defaults(tmp_path: Path) -> None:
    folder = other(tmp_path, "StableDiffusionPipeline", UNET)
    (folder / SERVING).write_text('{"steps": 1, "guidance_scale": 0.0, "strength": 0.5}')
    card = read_model_card(folder)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (1, 0.0, 0.5)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_index\.json is missing"):
        read_model_card(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_model_card(tmp_path)


def test_an_autoencoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "vae" / "config.json").write_text('{"_class_name": "AutoencoderDC"}')
    with pytest.raises(ValueError, match="not an AutoencoderKL"):
        read_model_card(folder)


def test_the_digest_notices_every_change_and_nothing_else(tmp_path: Path) -> None:
    first = digest(checkpoint(tmp_path / "a"))
    assert digest(checkpoint(tmp_path / "b")) == first, "where it lies does not matter"
    weights = tmp_path / "b" / "transformer" / "weights.safetensors"
    for position in (0, SAMPLE_BYTES - 1, weights.stat().st_size - 1):
        data = bytearray((tmp_path / "a" / "transformer" / "weights.safetensors").read_bytes())
        data[position] ^= 1
        weights.write_bytes(data)
        assert digest(tmp_path / "b") != first
    weights.write_bytes((tmp_path / "a" / "transformer" / "weights.safetensors").read_bytes())
    assert digest(tmp_path / "b") == first
    (tmp_path / "b" / "tokenizer_2" / "chat_template.jinja").write_text("{{ messages }}")
    assert digest(tmp_path / "b") != first
    (tmp_path / "b" / "tokenizer_2" / "chat_template.jinja").unlink()
    (tmp_path / "b" / "vae" / "config.json").write_text("{}")
    assert digest(tmp_path / "b") != first


def test_the_native_size_is_the_autoencoders_and_else_that_of_flux(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert read_model_card(folder).native_size == 1024
    vae = folder / "vae" / "config.json"
    vae.write_text(json.dumps(json.loads(vae.read_text()) | {"sample_size": 256}))
    assert read_model_card(folder).native_size == 256
