"""Qwen-Image-Edit, whose text encoder and network look at the picture: rows equal diffusers' own pipelines.

The pipelines scale every picture to about 1024² pixels. Theirs keep the tests' size here, as ours do everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditInpaintPipeline, QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.packed.region import beside, region
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.families.processors import QwenPictureProcessor
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.distances import distance
from tests.integration.painting import Served, assert_paints, ended, final_latent, of_edit, served
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, mask, picture

SIZE: Final = Size(112, 80)
SEED, STEPS = 7, 3
LATENTS: Final = 1e-5
"""Largest difference of final latents, relative to the largest value."""
EVERYTHING = np.full((SIZE.height, SIZE.width), 255, np.uint8)


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    served: Served
    pipeline: Any

    def edited(self, key: str, marked: Any = None, image: Pixels | None = None, **asked: Any) -> Row:
        told = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS}
        parameters = of_edit(self.served.card, **told | asked)
        marked = mask(SIZE) if marked is None else marked
        return self.served.edited(key, parameters, picture(SIZE) if image is None else image, marked)

    def painted(self, kind: Any, **told: Any) -> tuple[Tensor, Pixels]:
        """Final latents (tokens, channels) and picture of a pipeline of `kind`."""
        caught: list[Tensor] = []
        pipeline = kind(**self.pipeline.components)
        pipeline.set_progress_bar_config(disable=True)

        def ended(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.append(tensors["latents"][0])
            return {}

        painted = pipeline(
            image=Image.fromarray(picture(SIZE)),
            prompt=PROMPT,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=ended,
            **told,
        ).images[0]
        return caught[-1], np.asarray(painted)


@pytest.fixture(scope="module")
def both(tiny_checkpoint: Callable[[Family], Path]) -> Both:
    folder = tiny_checkpoint(Family.QWEN_IMAGE_EDIT)
    processor = QwenPictureProcessor.of(folder / "processor")
    return Both(served(folder), opened(QwenImageEditInpaintPipeline, folder, processor=processor))


@pytest.fixture(autouse=True)
def _of_any_size() -> Iterator[None]:
    """The pipelines keep the tests' size."""
    modules = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint)
    kept = [
        mock.patch.object(module, "calculate_dimensions", return_value=(*SIZE, None)) for module in modules
    ]
    with kept[0], kept[1]:
        yield


def assert_equal(both: Both, row: Row, found: tuple[Tensor, Pixels]) -> None:
    assert_paints(both.served, row, SIZE, *found, within=LATENTS)


@pytest.mark.parametrize(
    ("strength", "asked"), [(0.6, {}), (1.0, {"negative_prompt": NEGATIVE, "true_cfg_scale": 3.0})]
)
def test_a_masked_edit_equals_the_inpainting_pipeline(
    both: Both, strength: float, asked: dict[str, Any]
) -> None:
    row = both.edited("edit", strength=strength, **asked)
    assert (row.companions, len(row.prompts)) == (row.image_tokens, 2 if asked else 1)
    found = both.painted(
        QwenImageEditInpaintPipeline, mask_image=Image.fromarray(mask(SIZE)), strength=strength, **asked
    )
    assert_equal(both, row, found)


def test_an_edit_without_a_mask_equals_the_instruction_pipeline(both: Both) -> None:
    assert_equal(both, both.edited("whole", EVERYTHING), both.painted(QwenImageEditPipeline))


def test_text_encoder_and_network_see_the_picture(both: Both) -> None:
    images, other = both.served.images, 255 - picture(SIZE)
    text, moved = (
        images.encode_text(PROMPT, SIZE, [seen])["prompt_embeds"] for seen in (picture(SIZE), other)
    )
    assert float((text - moved).abs().max()) > 0.01
    row = both.edited("edit", EVERYTHING)
    blind = replace(row, conditioning={**row.conditioning, "image_latents": torch.zeros_like(row.latent)})
    assert distance(final_latent(both.served, row), final_latent(both.served, blind)) > 300 * LATENTS
    assert images.text_tokens({"prompt_embeds": text}) == row.prompts[0].joint_tokens


@pytest.mark.parametrize("form", list(CacheForm))
def test_a_masked_row_beside_others_takes_what_was_recorded(both: Both, form: CacheForm) -> None:
    edit = both.edited("edit")
    recorded = replace(edit, records=RecordingSpec(frozenset({form}), EXACT))
    full = ended(both.served.checkpoint, [recorded])["edit"]
    found = region(edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0)
    assert found is not None
    template = CachedTemplate("itself", edit.grid, full.entries)
    taking = replace(edit, region=beside(found, edit.companions), template=template, tolerance=0.0)
    other = both.edited("other", image=255 - picture(SIZE))
    together = ended(both.served.checkpoint, [taking, other])
    assert distance(together["edit"].latent, full.latent) <= LATENTS
    assert distance(together["other"].latent, final_latent(both.served, other)) <= LATENTS
