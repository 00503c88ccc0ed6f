"""The model that ships is a plain diffusers checkpoint, small, and does what its card says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_lab.model.fill import TEXT_TOKENS
from giornata_lab.model.scenes import SceneTask, shapes
from giornata_lab.quality import cases
from giornata_lab.quality.cases import QualityCase
from giornata_lab.quality.metrics import check, psnr_db
from giornata_tools.checkout import TRAINED

LARGEST_BYTES = 16 << 20
STEPS = 8
"""Fewer than the card's, for the test's time; enough for what is asserted."""


@pytest.fixture(scope="module")
def pipeline() -> FluxFillPipeline:
    """In float32, as services on a CPU run it."""
    loaded = FluxFillPipeline.from_pretrained(TRAINED, dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def edit(pipeline: Any, case: QualityCase, seed: int) -> NDArray[np.uint8]:
    """The pipeline's picture, pasted into what was there."""
    scene = case.scene
    side = scene.before.shape[0]
    painted = pipeline(
        prompt=scene.caption,
        image=Image.fromarray(scene.before),
        mask_image=shapes.image(scene.mask),
        height=side,
        width=side,
        num_inference_steps=STEPS,
        max_sequence_length=TEXT_TOKENS,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
    pasted: NDArray[np.uint8] = np.where(scene.mask[..., None], np.asarray(painted), scene.before)
    return pasted


def test_it_is_small_bfloat16_and_says_what_it_is() -> None:
    files = [path for path in TRAINED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LARGEST_BYTES
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pkl", ".ckpt"}], (
        "nothing to unpickle"
    )
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}, path  # noqa: SIM118
    card = read_model_card(TRAINED)
    assert (card.family, card.max_text_tokens, card.takes_guidance) == (Family.FLUX_FILL, TEXT_TOKENS, True)


@pytest.mark.long
@pytest.mark.xdist_group("fresco-prompts")  # together they would outlast every other group
@pytest.mark.parametrize("side", [128, 256])
def test_the_pipeline_paints_what_the_prompt_says(pipeline: FluxFillPipeline, side: int) -> None:
    right = 0
    slots = [slot for slot in cases.slots() if slot.task is SceneTask.ADD and slot.side == side]
    chosen = cases.spread(slots, 12)
    for slot in chosen:
        case = cases.draw(slot)
        found = check(edit(pipeline, case, slot.index), case.bare, case.scene.mask)
        right += found.is_a(slot.colour, slot.shape)
    assert right >= len(chosen) * 3 / 4, f"{right} of {len(chosen)} edits were right"


@pytest.mark.long
@pytest.mark.xdist_group("fresco-backgrounds")  # together they would outlast every other group
@pytest.mark.parametrize("side", [128, 256])
def test_the_pipeline_completes_the_background(pipeline: FluxFillPipeline, side: int) -> None:
    slots = [slot for slot in cases.slots() if slot.task is SceneTask.REMOVE and slot.side == side]
    found = []
    for slot in cases.spread(slots, 6):
        case = cases.draw(slot)
        scene = case.scene
        found.append(psnr_db(edit(pipeline, case, slot.index), scene.after, scene.mask))
        untouched = psnr_db(scene.before, scene.after, scene.mask)
        assert found[-1] > untouched + 3, f"{slot.name}: {found[-1]:.1f} dB"
    assert np.mean(found) >= 24, f"{found} dB"
