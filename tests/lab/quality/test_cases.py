"""The held-out edits: which there are, that they are always the same, and that they can be measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality import cases, probes
from giornata_lab.quality.cases import QualityCase, digest, draw, slots, spread
from giornata_tools.lora_profiler.probes import SCENES

FIXED = (
    ("051-add-128-orange-heart", 1927, 163.11, 161.91),
    ("153-add-128-teal-diamond", 1568, 108.63, 109.06),
    ("255-add-128-pink-cross", 1800, 165.22, 165.70),
    ("357-add-128-gray-square", 1256, 99.52, 100.80),
    ("459-add-256-white-star", 7280, 158.28, 160.02),
    ("561-remove-128-white-cross", 2091, 128.37, 123.64),
)
"""Name, masked pixels, means before and after: figures of other versions are comparable only while these hold."""


@pytest.fixture(scope="module")
def some() -> list[QualityCase]:
    return [draw(slot) for slot in spread(slots(), 40)]


def test_the_held_out_scenes_are_still_those_that_were_measured() -> None:
    found = [draw(slot) for slot in spread(slots(), len(FIXED))]
    for case, (name, masked_px, before, after) in zip(found, FIXED, strict=True):
        scene = case.scene
        assert (case.slot.name, int(scene.mask.sum())) == (name, masked_px)
        assert [scene.before.mean(), scene.after.mean()] == pytest.approx([before, after], abs=0.05)


def test_a_digest_tells_a_changed_pixel_mask_and_caption(some: list[QualityCase]) -> None:
    scene = some[0].scene
    before = digest([some[0]])
    scene.after[0, 0, 0] ^= 1
    try:
        assert digest([some[0]]) != before
    finally:
        scene.after[0, 0, 0] ^= 1
    assert digest([some[0]]) == before


def test_no_scene_is_one_of_training_s() -> None:
    """numpy pads short seeds with zeros, so a seed of three words could equal one of four."""
    states = {
        tuple(np.random.SeedSequence((seed, side, n)).generate_state(2))
        for seed in range(8)
        for side in (64, 128, 256)
        for n in range(700)
    }
    ours = {
        tuple(np.random.SeedSequence((cases.ENTROPY, s.side, s.index, 0)).generate_state(2)) for s in slots()
    }
    assert not states & ours
    assert len(ours) == len(slots())


def test_only_the_mask_differs_between_before_and_truth_and_there_it_does(some: list[QualityCase]) -> None:
    for case in some:
        changed = (case.scene.before != case.scene.after).any(2)
        assert not (changed & ~case.scene.mask).any()
        assert (changed & case.scene.mask).any()


@pytest.mark.parametrize("limit", [1, 5, 100, 611])
def test_a_quick_look_is_spread_over_the_set(limit: int) -> None:
    found = spread(slots(), limit)
    assert len({slot.name for slot in found}) == limit
    steps = np.diff([slot.index for slot in found])
    if limit >= 5:
        assert {slot.task for slot in found} == {SceneTask.ADD, SceneTask.REMOVE}
        assert np.ptp(steps) <= 1


def test_the_profilers_scenes_are_those_that_are_drawn_here(tmp_path: Path) -> None:
    probes.draw(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert (drawn, len(drawn)) == (sorted(path.name for path in SCENES.iterdir()), 3 * probes.COUNT)
    for name in drawn:
        one, other = tmp_path / name, SCENES / name
        if one.suffix == ".txt":
            assert one.read_bytes() == other.read_bytes()
        else:
            with Image.open(one) as made, Image.open(other) as kept:
                assert np.array_equal(np.asarray(made), np.asarray(kept))
