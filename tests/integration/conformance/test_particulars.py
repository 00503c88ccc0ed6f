"""What single families have beside what all have: processors, chunks of prompts, and options of their checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from PIL import Image
from transformers import Qwen2VLProcessor

from giornata.families import Family
from giornata.wire.errors import SchemaMismatch, TooManyPixels
from giornata.wire.models import Sampler
from giornata_denoiser.families.network import build_row
from giornata_lab.baseline.pipeline import opened
from giornata_lab.bench.compute.rows import changed
from giornata_prepost.families.processors import PICTURE, PixtralTextProcessor, QwenPictureProcessor
from giornata_prepost.images import stages
from giornata_prepost.images.pictures import Size
from giornata_prepost.images.stages import PixelLimits
from tests.distances import distance
from tests.integration.conformance.families import (
    CASES,
    REFERENCES,
    SEED,
    TEXT,
    Asked,
    OpenFamily,
    pixtral_processor,
)
from tests.integration.conformance.test_families import CLOSE, assert_paints, guided, plain
from tests.integration.painting import ended, final_latent, of_generation, served
from tests.integration.prepost.oracle import PROMPT, mask, picture

Opened = Callable[[str], OpenFamily]


def test_text_encoder_and_network_see_every_picture(opened_family: Opened) -> None:
    of = opened_family("qwen-image-edit-plus")
    images, own, (one, other, _) = of.served.images, picture(of.case.size), REFERENCES
    seen = [(own, one, other), (255 - own, one, other), (own, one, 255 - other), (own, other, one)]
    text, *moved = (images.encode_text(PROMPT, of.case.size, each)["prompt_embeds"] for each in seen)
    assert all(float((text - each).abs().max()) > 0.01 for each in moved)
    asked = plain(of, references=of.case.references)
    row = of.edit(asked, whole=True)
    blind = changed(
        row,
        conditioning={
            **row.inputs.conditioning,
            "references": torch.zeros_like(row.inputs.conditioning["references"]),
        },
    )
    assert distance(final_latent(of.served, row), final_latent(of.served, blind)) > 100 * CLOSE


class WholeProcessor(QwenPictureProcessor):
    """What transformers' own class makes of the same two parts."""

    image_token, video_token = PICTURE, "<|video_pad|>"
    video_processor = chat_template = None
    __call__ = Qwen2VLProcessor.__call__

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(PICTURE), -1


def test_prompts_with_several_pictures_are_read_as_transformers_does(opened_family: Opened) -> None:
    mine: Any = opened_family("qwen-image-edit-plus").pipeline.processor
    whole: Any = WholeProcessor(mine.image_processor, mine.tokenizer)
    each = "".join(f"Picture {n}: <|vision_start|>{PICTURE}<|vision_end|>" for n in (1, 2, 3))
    given = {"text": [each + PROMPT], "images": [Image.fromarray(scene) for scene in REFERENCES]}
    found, wanted = (read(**given, padding=True, return_tensors="pt") for read in (mine, whole))
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(found[name], wanted[name])


def test_an_instruction_of_edit_plus_looks_at_three_references(opened_family: Opened) -> None:
    of = opened_family("qwen-image-edit-plus")
    asked = plain(of, references=3)
    row = of.edit(asked, whole=True)
    assert row.inputs.companions == row.image_tokens + 48 * 3
    assert_paints(of, row, of.repainted(asked))


def test_the_noise_levels_of_lightning_loras_equal_the_pipelines(opened_family: Opened) -> None:
    """With the scheduler that is published beside these LoRAs, in 4 steps without guidance."""
    of, shift = opened_family("qwen-image-edit-plus"), math.log(3)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        {
            "base_image_seq_len": 256,
            "base_shift": shift,
            "max_image_seq_len": 8192,
            "max_shift": shift,
            "num_train_timesteps": 1000,
            "shift": 1.0,
            "shift_terminal": None,
            "time_shift_type": "exponential",
            "use_dynamic_shifting": True,
        }
    )
    asked = plain(of, steps=4)
    fast = of.edit(replace(asked, sampler=Sampler.EULER_LIGHTNING), whole=True)
    assert fast.track.levels.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
    images = [Image.fromarray(picture(of.case.size))]
    found = of.called(of.case.whole, asked, parts={"scheduler": scheduler}, image=images)
    assert_paints(of, fast, found)
    assert distance(final_latent(of.served, of.edit(asked, whole=True)), found.latents) > 100 * CLOSE


def test_edits_of_qwen_image_21_begin_with_the_noise_and_picture_that_its_pipeline_prepares(
    opened_family: Opened,
) -> None:
    """Its pipeline paints no masks, and edits are held to it from there on; it takes the posterior's mode."""
    of = opened_family("qwen-image-2.1")
    row, size, channels = of.edit(plain(of)), of.case.size, of.served.card.latent_channels
    scene = Image.fromarray(picture(size)).convert("RGBA")
    pixels = of.pipeline.image_processor.preprocess(scene, *reversed(size)).unsqueeze(2)
    drawn = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        prepared = of.pipeline.prepare_latents(
            [pixels], 1, channels, *reversed(size), torch.float32, torch.device("cpu"), drawn
        )
    for name, theirs in zip(("noise", "image_latents"), prepared, strict=True):
        assert distance(row.inputs.conditioning[name], theirs[0]) <= CLOSE, name


@pytest.mark.parametrize("prompt", [PROMPT, "", "a [IMG] sign", "one two some " * 30], ids=len)
def test_conversations_of_flux2_are_the_tokens_of_pixtrals_processor(
    prompt: str, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    """Padded on the left, and cut where they are too long."""
    folder = tiny_checkpoint(Family.FLUX2)
    told: dict[str, Any] = {
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "add_generation_prompt": False,
        "padding": "max_length",
        "truncation": True,
        "max_length": TEXT,
    }
    messages = format_input([prompt], SYSTEM_MESSAGE)
    mine = PixtralTextProcessor.from_pretrained(folder / "tokenizer").apply_chat_template(messages, **told)
    theirs = pixtral_processor(folder).apply_chat_template(messages, **told)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine["input_ids"].shape == (1, TEXT)


def test_a_prompt_in_chunks_equals_the_pipeline_with_their_embeddings(opened_family: Opened) -> None:
    """Also beside a short one; and where only one half has two chunks."""
    of = opened_family("sdxl-inpaint")
    room = of.served.card.max_text_tokens - 2
    words, others = " ".join(["red"] * room + ["dog"]), " ".join(["hat"] * room + ["red"])
    long = replace(guided(of), prompt=words, guidance=of.case.guided | {"negative_prompt": others})
    images = of.served.images
    embeds = images.encode_text(words, of.case.size) | images.encode_unguided(others, of.case.size)
    given: dict[str, Any] = {
        key: tensor[None] for key, tensor in embeds.items() if key.endswith("prompt_embeds")
    }
    assert given["prompt_embeds"].shape[1] == 2 * of.served.card.max_text_tokens
    row = of.edit(long, "long")
    asked = replace(long, guidance=of.case.guided | {"negative_prompt": None})
    size = of.case.size
    theirs = of.called(
        of.case.inpaints,
        asked,
        prompt=None,
        image=Image.fromarray(picture(size)),
        mask_image=Image.fromarray(mask(size)),
        **given,
    )
    assert_paints(of, row, theirs)
    uneven = of.edit(replace(long, guidance=of.case.guided), "uneven")
    rows = [uneven, of.edit(guided(of), "short"), row]
    together = ended(of.served.checkpoint, rows)
    assert distance(together["uneven"].latent, final_latent(of.served, uneven)) <= CLOSE
    assert distance(together["long"].latent, theirs.latents) <= CLOSE


def test_a_model_that_predicts_velocity_equals_its_pipelines(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """As Stable Diffusion 2.1 does, with its scheduler."""
    kind: Any = DDIMScheduler
    case = CASES["sd"]
    pipeline = opened(case.inpaints, tiny_checkpoint(Family.SD))
    pipeline.scheduler = kind(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type="v_prediction",
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipeline.save_pretrained(tmp_path)
    of = OpenFamily(case, served(tmp_path), pipeline)
    assert of.served.card.default_sampler == Sampler.DDIM
    asked = guided(of)
    row = of.edit(asked)
    assert_paints(of, row, of.inpainted(asked, row))
    assert_paints(of, of.generation(asked), of.generated(asked))


def test_sdxl_guides_away_from_zeros_where_no_negative_prompt_is_given(opened_family: Opened) -> None:
    of = opened_family("sdxl")
    asked = Asked({"guidance_scale": 5.0}, steps=2, size=Size(64, 128))
    row = of.edit(asked)
    assert len(row.inputs.prompts) == 2
    assert_paints(of, row, of.inpainted(asked, row))
    unasked, empty = (of.served.images.encode_unguided(one, Size(64, 128)) for one in (None, ""))
    assert not unasked["negative_prompt_embeds"].any()
    assert empty["negative_prompt_embeds"].any()
    assert unasked["negative_add_time_ids"].tolist() == [128, 64, 0, 0, 128, 64]


def test_sd3_is_served_without_its_third_encoder(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(Family.SD3), tmp_path / "sd3"))
    shutil.rmtree(folder / "text_encoder_3")
    case = CASES["sd3"]
    of = OpenFamily(case, served(folder), opened(case.inpaints, folder, text_encoder_3=None))
    asked = guided(of, steps=2)
    row = of.edit(asked)
    assert_paints(of, row, of.inpainted(asked, row))


def test_an_edits_row_is_refused_without_its_picture(opened_family: Opened) -> None:
    of = opened_family("flux-inpaint")
    row = of.generation(plain(of))
    with pytest.raises(SchemaMismatch, match="image_latents"):
        build_row(
            of.served.checkpoint.family,
            row.key,
            grid=row.grid,
            track=row.track,
            text=of.served.images.encode_text(PROMPT, of.case.size),
            conditioning=row.inputs.conditioning,
            guidance_scale=3.5,
        )


def test_auto_is_the_native_square_and_limits_hold(opened_family: Opened) -> None:
    card = opened_family("flux-inpaint").served.card

    def measured(budget: int, **fields: Any) -> Any:
        asked = of_generation(card, prompt=PROMPT, **fields)
        return stages.measure_generation(asked, card, PixelLimits(1 << 20, budget))

    native = measured(1 << 16)
    assert (native.model_width, native.model_height) == (card.native_size,) * 2
    assert native.tokens == native.compute_tokens == (card.native_size // 16) ** 2
    assert native.prepared is None
    small = measured(100 * 100)
    assert (small.output_width, small.output_height) == (96, 96)
    with pytest.raises(TooManyPixels) as refused:
        measured(1 << 16, size="1024x1024")
    assert (refused.value.field, refused.value.accepted) == ("size", f"at most {1 << 16} pixels")
