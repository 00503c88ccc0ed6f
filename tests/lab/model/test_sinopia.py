"""The segmenter that ships loads in transformers, is small, is what its card says, and finds what words name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoProcessor, CLIPSegForImageSegmentation

from giornata_lab.demo.exhibits import FOLDER, SCENE_SEEDS, SCENE_SIDE, SCENES
from giornata_lab.model.adapters.lessons import sha256_of
from giornata_lab.model.scenes import SceneTask, sample
from giornata_lab.model.scenes.shapes import overlap
from giornata_lab.model.segmenter.__main__ import SIDES
from giornata_lab.model.segmenter.clipseg import WEIGHTS, ReferenceSegmenter, judge, read_card
from giornata_lab.model.segmenter.scenes import NAMES, seen
from giornata_lab.model.train import export, segmenter
from giornata_lab.model.train.run import StagePlan, TrainingStateUnusable
from giornata_tools.checkout import SEGMENTER

LARGEST_BYTES = 2_000_000
GATE = 0.85
"""Intersection over union."""
FEW = 12
"""Held-out scenes, for the test's time."""


@pytest.fixture(scope="module")
def sinopia() -> ReferenceSegmenter:
    return ReferenceSegmenter.load(SEGMENTER)


def test_it_is_small_float16_and_the_file_of_its_card() -> None:
    files = [path for path in SEGMENTER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LARGEST_BYTES
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pkl", ".ckpt"}]
    weights = SEGMENTER / WEIGHTS
    with safe_open(weights, "pt") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"F16"}  # noqa: SIM118
    told = read_card()
    assert (told.size_bytes, told.sha256) == (weights.stat().st_size, sha256_of(weights))


def test_transformers_alone_loads_it_and_finds_a_thing() -> None:
    model = CLIPSegForImageSegmentation.from_pretrained(SEGMENTER, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(SEGMENTER)
    with Image.open(FOLDER / "removal.png") as picture:
        inputs = processor(text=["the circle"], images=[picture.convert("RGB")], return_tensors="pt")
    with torch.inference_mode():
        found = model(**inputs).logits.sigmoid() > 0.5
    assert 0.005 < float(found.float().mean()) < 0.3


@pytest.mark.parametrize("side", SIDES)
def test_it_finds_what_held_out_phrases_mean(sinopia: ReferenceSegmenter, side: int) -> None:
    found = judge(sinopia, side, FEW)
    assert found["overlap"] >= GATE, found


@pytest.mark.parametrize("name", SCENES)
def test_it_finds_the_things_of_the_shipped_samples(sinopia: ReferenceSegmenter, name: str) -> None:
    """The scene that something is removed from has it; the other one gets it, so it is asked of the finished one."""
    task = SCENES[name]
    drawn = sample(np.random.default_rng(SCENE_SEEDS[task]), SCENE_SIDE, task, least_mask_px=64.0, clear=True)
    (thing,) = drawn.asked
    picture = drawn.before if task is SceneTask.REMOVE else drawn.after
    truth = seen([thing], SCENE_SIDE)[0] == NAMES.index(thing.colour)
    [mask] = sinopia.masks(picture, [f"the {thing.colour} {thing.shape}"])
    assert overlap(mask, truth) >= GATE


def test_the_recipe_goes_on_where_it_stopped_and_ends_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmenter, "POOLED", {48: 4, 96: 4})
    monkeypatch.setattr(segmenter, "BATCHES", ((0.5, 48, 2), (1.0, 96, 2)))

    def plan(steps: int) -> StagePlan:
        return StagePlan(tmp_path / "state", steps, 4, torch.device("cpu"))

    over = iter([False, True])
    with monkeypatch.context() as clock:
        clock.setattr(StagePlan, "over", lambda _: next(over))
        segmenter.run(plan(2))
    with pytest.raises(TrainingStateUnusable, match="stopped at step 1 of 2"):
        export.sinopia(tmp_path / "state", tmp_path / "made")
    segmenter.run(plan(2))
    export.sinopia(tmp_path / "state", tmp_path / "made")
    told = read_card(tmp_path / "made")
    assert (told.steps, told.seed, told.measured) == (2, 4, {})
    assert told.sha256 == sha256_of(tmp_path / "made" / WEIGHTS)
    made = ReferenceSegmenter.load(tmp_path / "made")
    assert [mask.shape for mask in made.masks(np.zeros((40, 60, 3), np.uint8), ["a star", "everything"])] == [
        (40, 60)
    ] * 2
    shipped = ReferenceSegmenter.load(SEGMENTER)
    assert made.model.config.to_diff_dict() == shipped.model.config.to_diff_dict(), "the shipped recipe"
