"""Model cards: what a checkpoint's folder says, by family, and a digest that notices every change."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from giornata.families import KINDS, CheckpointKind, Family
from giornata.model_cards import SAMPLE_BYTES, SERVING, digest, level_bytes, read_model_card
from giornata.wire.models import DISCRETE_TIME, Guidance, Task
from tests.fakes.checkpoints import SDXL_UNET, UNET, checkpoint, flux_checkpoint


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


# Cards of the families other than Flux: what each reads from its checkpoint, and which variants are refused.


def test_a_unets_card_is_that_of_its_tiles(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "sd", "StableDiffusionPipeline", UNET)
    card = read_model_card(folder)
    assert (card.family, card.pixel_multiple, card.mask_grain, card.native_size) == (Family.SD, 64, 8, 768)
    assert (card.guidance, card.guided_above) == (Guidance.CLASSIFIER_FREE, 1.0)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (50, 7.5, 1.0)
    # keys and values of 16 self-attentions: 5 of 96² cells, 5 of 48², 5 of 24² and 1 of 12², in 4 bits
    cells = 5 * (320 * 96**2 + 640 * 48**2 + 1280 * 24**2) + 1280 * 12**2
    # as `docs/results/families.md` counts at 512²: 46 MB of keys and values, 44 of borders, and 1 of moments
    assert level_bytes(folder, card, 16) == pytest.approx(4 * cells + 2.25 * 45.1e6, rel=0.01)
    folder = checkpoint(tmp_path / "xl", "StableDiffusionXLPipeline", SDXL_UNET)
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
    card = read_model_card(checkpoint(tmp_path, pipeline, network | {"in_channels": 9}))
    assert (card.family, card.tasks, card.generation_guidance_scale) == (family, (Task.EDIT,), None)


@pytest.mark.parametrize(
    ("pipeline", "network", "scale"),
    [("StableDiffusionInpaintPipeline", UNET, 7.5), ("StableDiffusionXLPipeline", SDXL_UNET, 5.0)],
)
def test_a_plain_unet_generates_whatever_pipeline_its_folder_names(
    tmp_path: Path, pipeline: str, network: dict[str, Any], scale: float
) -> None:
    card = read_model_card(checkpoint(tmp_path, pipeline, network))
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
    folder = checkpoint(tmp_path, pipeline, UNET | network, vae=vae, **told)
    with pytest.raises(ValueError, match=f"cannot be served: .*{reason}"):
        read_model_card(folder)


def test_sd3_takes_the_tokens_of_both_kinds_of_encoders_and_16_channels_alone(tmp_path: Path) -> None:
    network = {"in_channels": 16, "sample_size": 128}
    of = partial(checkpoint, pipeline="StableDiffusion3Pipeline", tokenizer="tokenizer_3", length=512)
    card = read_model_card(of(tmp_path / "a", network=network))
    assert (card.family, card.max_text_tokens, card.native_size, card.default_strength) == (
        Family.SD3, 256 + 77, 1024, 0.6
    )  # fmt: skip
    with pytest.raises(ValueError, match="33 input channels; served are 16"):
        read_model_card(of(tmp_path / "b", network=network | {"in_channels": 33}))


def test_a_distilled_klein_takes_few_steps_and_no_guidance(tmp_path: Path) -> None:
    of = partial(checkpoint, pipeline="Flux2KleinPipeline", network={"guidance_embeds": False})
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


def test_flux_2_embeds_guidance_unless_its_network_says_otherwise(tmp_path: Path) -> None:
    """Checkpoints written before Klein came do not name `guidance_embeds`; diffusers' class then embeds it."""
    of = partial(checkpoint, pipeline="Flux2Pipeline")
    card = read_model_card(of(tmp_path / "dev", network={}))
    assert (card.family, card.guidance, card.guided_above) == (Family.FLUX2, Guidance.EMBEDDED, None)
    assert (card.default_steps, card.default_guidance_scale, card.generation_guidance_scale) == (50, 4.0, 4.0)
    assert (card.default_strength, card.references, card.max_references) == (1.0, 1, 8)
    assert not card.takes_negative_prompt
    without = read_model_card(of(tmp_path / "without", network={"guidance_embeds": False}))
    assert without.guidance is Guidance.NONE


def test_z_image_turbo_is_told_by_its_scheduler(tmp_path: Path) -> None:
    of = partial(checkpoint, pipeline="ZImagePipeline", network={})
    base, turbo = (read_model_card(of(tmp_path / str(s), scheduler={"shift": s})) for s in (6.0, 3.0))
    assert (base.default_steps, base.default_guidance_scale, base.guided_above) == (50, 5.0, 0.0)
    assert (turbo.default_steps, turbo.default_guidance_scale, turbo.guided_above) == (9, 0.0, 0.0)
    assert (base.generation_guidance_scale, turbo.generation_guidance_scale) == (5.0, 0.0)
    (tmp_path / "3.0" / SERVING).write_text('{"generation_guidance_scale": 2.0}')
    assert read_model_card(tmp_path / "3.0").generation_guidance_scale == 2.0


def test_qwens_autoencoder_is_read_by_its_own_names(tmp_path: Path) -> None:
    vae = {"temperal_downsample": [False, True, True], "z_dim": 16}
    folder = checkpoint(tmp_path, "QwenImagePipeline", {"guidance_embeds": False}, vae=vae, length=131_072)
    card = read_model_card(folder)
    assert (card.vae_scale_factor, card.latent_channels, card.max_text_tokens) == (8, 16, 512)
    assert (card.takes_guidance, card.takes_true_cfg, card.default_true_cfg_scale) == (False, True, 4.0)
    (folder / "vae" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not an AutoencoderKLQwenImage of diffusers"):
        read_model_card(folder)


def test_serving_json_tells_other_defaults(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "StableDiffusionPipeline", UNET)
    (folder / SERVING).write_text('{"steps": 1, "guidance_scale": 0.0, "strength": 0.5}')
    card = read_model_card(folder)
    assert (card.default_steps, card.default_guidance_scale, card.default_strength) == (1, 0.0, 0.5)


def test_steps_of_generations_are_those_of_their_pipeline_unless_the_checkpoint_tells(tmp_path: Path) -> None:
    network = {"in_channels": 16, "sample_size": 128}
    folder = checkpoint(tmp_path, "StableDiffusion3Pipeline", network, tokenizer="tokenizer_3")

    def steps(told: str) -> tuple[int, int | None]:
        (folder / SERVING).write_text(told)
        card = read_model_card(folder)
        return card.default_steps, card.generation_steps

    assert steps("{}") == (50, 28)
    assert steps('{"steps": 4}') == (4, None), "both tasks have them"
    assert steps('{"steps": 4, "generation_steps": 6}') == (4, 6)
    inpaint = checkpoint(tmp_path / "nine", "StableDiffusionPipeline", UNET | {"in_channels": 9})
    (inpaint / SERVING).write_text('{"generation_steps": 6}')
    assert read_model_card(inpaint).generation_steps is None
