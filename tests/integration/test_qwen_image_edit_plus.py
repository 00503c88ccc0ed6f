"""Qwen-Image-Edit 2509 and 2511, whose text encoder and network look at several pictures: rows equal diffusers' own.

The pipeline scales every picture to about 1024² pixels, here to about 112², which leaves the pictures as they are. It
paints no mask: an edit with one is its call, blended after each of its steps.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor

from giornata.families import Family
from giornata.packed.region import beside, region
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.families.processors import PICTURE, QwenPictureProcessor
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.distances import distance
from tests.integration.painting import Served, assert_paints, ended, final_latent, of_edit, served
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, mask, picture

SIZE: Final = Size(128, 96)
BESIDE: Final = (Size(96, 128), Size(192, 64), Size(64, 192))
"""Of three references."""
SEED: Final = 7
EVEN: Final = [1.0, 0.75, 0.5, 0.25]
"""The noise levels of four steps before the scheduler shifts them."""
CLOSE: Final = 1e-5
"""Largest difference of final latents, relative to the largest value."""
EVERYTHING: Final = np.full((SIZE.height, SIZE.width), 255, np.uint8)
GUIDED: Final[dict[str, Any]] = {"negative_prompt": NEGATIVE, "true_cfg_scale": 3.0}


def scenes(count: int) -> list[Pixels]:
    return [picture(size) for size in BESIDE[:count]]


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    served: Served
    pipeline: Any

    def edited(
        self, key: str, marked: Any, references: int, image: Pixels | None = None, **asked: Any
    ) -> Row:
        told = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": len(EVEN)}
        parameters = of_edit(self.served.card, **told | asked)
        image = picture(SIZE) if image is None else image
        return self.served.edited(key, parameters, image, marked, references=scenes(references))

    def called(self, references: int, **told: Any) -> tuple[Tensor, Pixels]:
        """Final latents, (tokens, channels), and the picture that a call of the pipeline makes of them."""
        caught: list[Tensor] = []
        blended = told.pop("blended", lambda _step, latents: latents)

        def after(_pipeline: Any, step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.append(blended(step, tensors["latents"]))
            return {"latents": caught[-1]}

        asked = {
            "image": [Image.fromarray(each) for each in (picture(SIZE), *scenes(references))],
            "prompt": PROMPT,
            "width": SIZE.width,
            "height": SIZE.height,
            "num_inference_steps": len(EVEN),
            "generator": torch.Generator().manual_seed(SEED),
            "callback_on_step_end": after,
        }
        painted = self.pipeline(**asked | told).images[0]
        return caught[-1][0], np.asarray(painted)

    def blended(self, row: Row, references: int, **told: Any) -> tuple[Tensor, Pixels]:
        """What the pipeline makes of a masked edit's row: it begins where the row does."""
        noise, clean, kept = (row.conditioning[name] for name in ("noise", "image_latents", "mask"))

        def after(step: int, latents: Tensor) -> Tensor:
            level = row.track.levels[step + 1]
            return (1 - kept) * (level * noise + (1 - level) * clean) + kept * latents

        begun = {"sigmas": EVEN[-row.steps :], "latents": row.latent[None]}
        return self.called(references, **begun, blended=after, **told)


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def both(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[Family], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Both:
    """2511's transformer modulates clean tokens as at timestep 0."""
    folder = tmp_path_factory.mktemp("plus") / "model"
    shutil.copytree(tiny_checkpoint(Family.QWEN_IMAGE_EDIT_PLUS), folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"zero_cond_t": request.param}))
    processor = QwenPictureProcessor.of(folder / "processor")
    found = Both(served(folder), opened(QwenImageEditPlusPipeline, folder, processor=processor))
    assert found.pipeline.transformer.zero_cond_t == request.param
    return found


@pytest.fixture(autouse=True)
def _of_small_pictures() -> Iterator[None]:
    with mock.patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 112**2):
        yield


def assert_equal(both: Both, row: Row, found: tuple[Tensor, Pixels]) -> None:
    assert_paints(both.served, row, SIZE, *found, within=CLOSE)


class WholeProcessor(QwenPictureProcessor):
    """What transformers' own class makes of the same two parts."""

    image_token, video_token = PICTURE, "<|video_pad|>"
    video_processor = chat_template = None
    __call__ = Qwen2VLProcessor.__call__

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(PICTURE), -1


def test_prompts_with_several_pictures_are_read_as_transformers_does(both: Both) -> None:
    mine: Any = both.pipeline.processor
    whole: Any = WholeProcessor(mine.image_processor, mine.tokenizer)
    each = "".join(f"Picture {n}: <|vision_start|>{PICTURE}<|vision_end|>" for n in (1, 2, 3))
    given = {"text": [each + PROMPT], "images": [Image.fromarray(scene) for scene in scenes(3)]}
    found, wanted = (read(**given, padding=True, return_tensors="pt") for read in (mine, whole))
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(found[name], wanted[name])


@pytest.mark.parametrize("references", [0, 1, 2, 3])
def test_an_instruction_equals_the_pipeline(both: Both, references: int) -> None:
    row = both.edited("whole", EVERYTHING, references)
    assert row.companions == row.image_tokens + 48 * references
    assert_equal(both, row, both.called(references))


def test_a_guided_instruction_equals_the_pipeline(both: Both) -> None:
    row = both.edited("guided", EVERYTHING, 2, **GUIDED)
    assert len(row.prompts) == 2
    assert_equal(both, row, both.called(2, **GUIDED))


def test_the_noise_levels_of_lightning_loras_equal_the_pipelines(both: Both) -> None:
    """With the scheduler that is published beside these LoRAs, in 4 steps without guidance."""
    shift = math.log(3)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        {
            "base_image_seq_len": 256,
            "base_shift": shift,
            "invert_sigmas": False,
            "max_image_seq_len": 8192,
            "max_shift": shift,
            "num_train_timesteps": 1000,
            "shift": 1.0,
            "shift_terminal": None,
            "stochastic_sampling": False,
            "time_shift_type": "exponential",
            "use_beta_sigmas": False,
            "use_dynamic_shifting": True,
            "use_exponential_sigmas": False,
            "use_karras_sigmas": False,
        }
    )
    pipeline = QwenImageEditPlusPipeline(**both.pipeline.components | {"scheduler": scheduler})
    pipeline.set_progress_bar_config(disable=True)
    row = both.edited("fast", EVERYTHING, 1, sampler="euler_lightning")
    assert row.track.levels.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
    found = replace(both, pipeline=pipeline).called(1)
    assert_equal(both, row, found)
    assert distance(final_latent(both.served, both.edited("own", EVERYTHING, 1)), found[0]) > 1000 * CLOSE


@pytest.mark.parametrize(("references", "strength", "steps"), [(0, 0.5, 2), (1, 1.0, 4), (3, 0.5, 2)])
def test_a_masked_edit_equals_the_pipelines_steps_blended(
    both: Both, references: int, strength: float, steps: int
) -> None:
    row = both.edited("edit", mask(SIZE), references, strength=strength, **GUIDED)
    assert row.steps == steps
    assert_equal(both, row, both.blended(row, references, **GUIDED))


def test_text_encoder_and_network_see_every_picture(both: Both) -> None:
    images, (one, other, third) = both.served.images, scenes(3)
    seen: Sequence[Sequence[Pixels]] = (
        (picture(SIZE), one, other),
        (picture(SIZE), one, 255 - other),
        (picture(SIZE), other, one),
        (picture(SIZE), one, other, third),
    )
    text, *moved = (images.encode_text(PROMPT, SIZE, each)["prompt_embeds"] for each in seen)
    for each in moved[:2]:
        assert each.shape == text.shape
        assert float((text - each).abs().max()) > 0.01
    assert len(moved[2]) > len(text) + 100
    row = both.edited("edit", EVERYTHING, 2)
    assert images.text_tokens({"prompt_embeds": text}) == row.prompts[0].joint_tokens
    clean = row.conditioning["references"]
    blind = replace(row, conditioning={**row.conditioning, "references": torch.zeros_like(clean)})
    assert distance(final_latent(both.served, row), final_latent(both.served, blind)) > 300 * CLOSE


def test_rows_of_one_batch_equal_each_alone(both: Both) -> None:
    """They differ in references, steps, strength, guidance and mask."""
    rows = [
        both.edited("a", EVERYTHING, 3, num_inference_steps=2),
        both.edited("b", mask(SIZE), 0, prompt="a scarf", strength=0.5, **GUIDED),
        both.edited("c", mask(SIZE), 1, image=255 - picture(SIZE), num_inference_steps=3),
    ]
    together = ended(both.served.checkpoint, rows)
    for row in rows:
        assert distance(together[row.key.job_id].latent, final_latent(both.served, row)) <= CLOSE


@pytest.mark.parametrize("form", list(CacheForm))
def test_a_masked_row_beside_others_takes_what_was_recorded(both: Both, form: CacheForm) -> None:
    edit = both.edited("edit", mask(SIZE), 2)
    recorded = replace(edit, records=RecordingSpec(frozenset({form}), EXACT))
    full = ended(both.served.checkpoint, [recorded])["edit"]
    found = region(edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0)
    assert found is not None
    template = CachedTemplate("itself", edit.grid, full.entries)
    taking = replace(edit, region=beside(found, edit.companions), template=template, tolerance=0.0)
    other = both.edited("other", EVERYTHING, 1, image=255 - picture(SIZE))
    together = ended(both.served.checkpoint, [taking, other])
    assert distance(together["edit"].latent, full.latent) <= CLOSE
    assert distance(together["other"].latent, final_latent(both.served, other)) <= CLOSE
