"""Model cards: what a checkpoint's folder says, and a digest that notices every change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giornata.families import KINDS, CheckpointKind, Family
from giornata.model_cards import SAMPLE_BYTES, digest, read_model_card
from giornata.wire.models import DISCRETE_TIME
from tests.fakes.checkpoints import flux_checkpoint


def test_a_fill_flux_checkpoint(tmp_path: Path) -> None:
    card = read_model_card(flux_checkpoint(tmp_path / "fill"))
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
    card = read_model_card(flux_checkpoint(tmp_path, pipeline), "named")
    assert (card.name, card.family, card.default_strength) == ("named", Family.FLUX_INPAINT, 0.6)
    assert card.takes_true_cfg
    assert card.mask_grain == 8, "it tells edited from kept by whole latent pixels"


def test_a_timestep_distilled_checkpoint_takes_no_guidance_and_few_steps(tmp_path: Path) -> None:
    card = read_model_card(flux_checkpoint(tmp_path, "FluxPipeline", guidance=False))
    assert (card.takes_guidance, card.default_steps) == (False, 4)


@pytest.mark.parametrize(("written", "length"), [(48, 48), (512, 512), (int(1e30), 512)])
def test_text_is_padded_as_the_tokenizer_says_and_to_512_at_most(
    tmp_path: Path, written: int, length: int
) -> None:
    assert read_model_card(flux_checkpoint(tmp_path, text_length=written)).max_text_tokens == length


@pytest.mark.parametrize(
    ("unknown", "closest"),
    [
        (
            "StableDiffusionXLInstructPix2PixPipeline",
            "; the closest that is: StableDiffusionXLInpaintPipeline",
        ),
        ("StableDiffusion3ControlNetPipeline", "; the closest that is: StableDiffusion3Pipeline"),
        ("QwenImageLayeredPipeline", "; the closest that is: QwenImagePipeline"),
        *(
            (name, "")
            for name in (
                "HunyuanDiTPipeline",
                "SanaPipeline",
                "HiDreamImagePipeline",
                "ErnieImagePipeline",
                "None",
            )
        ),
    ],
)
def test_a_refusal_names_the_closest_pipeline_if_one_is_close(
    tmp_path: Path, unknown: str, closest: str
) -> None:
    with pytest.raises(
        ValueError, match=f"{unknown}, which is not served{closest}. All that are: FluxPipeline"
    ):
        read_model_card(flux_checkpoint(tmp_path, unknown))


def test_a_family_more_is_a_row_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = CheckpointKind(
        "toy", takes_true_cfg=True, steps=9, guidance_scale=5.0, strength=0.5, token_latents=1,
        network="unet", tokenizer="tokenizer", max_text_tokens=77,
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "ToyPipeline", toy)
    folder = flux_checkpoint(tmp_path, "ToyPipeline")
    (folder / "transformer").rename(folder / "unet")
    (folder / "tokenizer_2").rename(folder / "tokenizer")
    card = read_model_card(folder)
    assert (card.family, card.pixel_multiple, card.max_text_tokens) == ("toy", 8, 48)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (9, 5.0, 0.5)


def test_the_default_sampler_is_the_checkpoints_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = CheckpointKind(
        "timed", takes_true_cfg=True, steps=9, guidance_scale=5.0, strength=0.5, samplers=DISCRETE_TIME
    )
    monkeypatch.setitem(KINDS, "TimedPipeline", timed)
    folder = flux_checkpoint(tmp_path, "TimedPipeline")
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


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_index\.json is missing"):
        read_model_card(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_model_card(tmp_path)


def test_an_autoencoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = flux_checkpoint(tmp_path)
    (folder / "vae" / "config.json").write_text('{"_class_name": "AutoencoderDC"}')
    with pytest.raises(ValueError, match="not an AutoencoderKL"):
        read_model_card(folder)


def test_the_digest_notices_every_change_and_nothing_else(tmp_path: Path) -> None:
    first = digest(flux_checkpoint(tmp_path / "a"))
    assert digest(flux_checkpoint(tmp_path / "b")) == first, "where it lies does not matter"
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
    folder = flux_checkpoint(tmp_path)
    assert read_model_card(folder).native_size == 1024
    vae = folder / "vae" / "config.json"
    vae.write_text(json.dumps(json.loads(vae.read_text()) | {"sample_size": 256}))
    assert read_model_card(folder).native_size == 256
