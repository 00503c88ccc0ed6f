"""What the adapters that ship learn from, and how they are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from giornata_lab.model.adapters import card, judging, lessons
from giornata_lab.model.scenes import COLOURS, SceneTask, sample
from giornata_lab.model.scenes import scene as captions
from giornata_lab.model.scenes.shapes import SceneShape
from giornata_lab.quality import cases
from giornata_lab.quality.checker import check

ADDED = judging.additions(3)
FREE = lessons.held_out(4)


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_every_colour_has_one_partner() -> None:
    assert set(lessons.SWAPPED) == set(COLOURS)
    assert all(lessons.SWAPPED[other] == one != other for one, other in lessons.SWAPPED.items())


@pytest.mark.parametrize(
    ("caption", "exchanged"),
    [
        ("an orange star", "a blue star"),
        ("put a blue ring here", "put an orange ring here"),
        ("the grey heart", "the brown heart"),
        ("two white squares", "two black squares"),
        ("a red star and an orange cross", "a teal star and a blue cross"),
        ("remove it", "remove it"),
        ("", ""),
    ],
)
def test_captions_are_exchanged(caption: str, exchanged: str) -> None:
    assert lessons.swapped_caption(caption) == exchanged


@given(seed=st.integers(0, 10**6))
def test_exchanged_twice_is_the_caption(seed: int) -> None:
    caption = sample(rng(seed), 48).caption.replace("grey", "gray")
    assert lessons.swapped_caption(lessons.swapped_caption(caption)) == caption
    assert set(lessons.swapped_caption(caption).split()) <= {*captions.words()}


@given(seed=st.integers(0, 10**6))
def test_rims_lie_inside_of_what_is_asked_for(seed: int) -> None:
    scene = sample(rng(seed), 64, SceneTask.ADD)
    rimmed = lessons.outlined(scene)
    changed = (rimmed.after != scene.after).any(axis=2)
    area = lessons.silhouette(scene.asked, 64)
    assert not (changed & ~area).any()
    edge = area & ~ndimage.binary_erosion(area, border_value=1)
    assert (rimmed.after[edge] == lessons.RIM_LEVEL).all()
    np.testing.assert_array_equal(rimmed.before, scene.before)


def test_a_removal_has_no_rim() -> None:
    scene = sample(rng(1), 64, SceneTask.REMOVE)
    assert lessons.outlined(scene) is scene


def test_true_rims_are_dark_and_others_are_not() -> None:
    for case in ADDED:
        scene = case.scene
        light = replace(scene.asked[0], colour="white")
        assert light.colour == "white"
        assert judging.dark_rim(lessons.outlined(scene).after, scene) > 0.75
        assert judging.dark_rim(scene.before, scene) == 0, "nothing was painted"
        assert judging.closed_rim(lessons.outlined(scene).after, scene) == 1
        assert judging.closed_rim(scene.before, scene) == 0, "nothing was painted"
    plain = [case.scene for case in ADDED if case.slot.colour not in {"black", "brown"}]
    assert plain
    assert all(judging.dark_rim(scene.after, scene) < 0.2 for scene in plain)
    assert all(judging.closed_rim(scene.after, scene) < 0.2 for scene in plain)


def test_a_rim_on_one_side_is_half_closed() -> None:
    scene = ADDED[0].scene
    left = np.arange(len(scene.mask)) < scene.asked[0].x
    half = np.where(left[:, None], lessons.outlined(scene).after, scene.after)
    assert 0.3 < judging.closed_rim(half, scene) < 0.7


@pytest.mark.parametrize("side", [64, 128])
def test_the_mask_of_a_free_scene_does_not_tell_its_thing(side: int) -> None:
    """Over many scenes, the thing's centre lies all over the mask, and sizes and turns are spread."""
    shifts, sizes, turns = [], [], []
    for seed in range(60):
        scene = lessons.sample_free(rng(5, seed), side)
        (thing,) = scene.asked
        rows, columns = (np.flatnonzero(scene.mask.any(axis)) for axis in (1, 0))
        half = len(columns) / 2
        shifts.append((thing.x - columns.mean()) / half)
        sizes.append(thing.radius / half)
        turns.append(thing.angle_deg)
        assert rows.size
    assert np.std(shifts) > 0.15
    assert max(sizes) / min(sizes) > 1.6
    assert np.ptp(turns) > 300


def test_held_out_scenes_are_always_the_same_and_fit() -> None:
    again = lessons.held_out(len(FREE))
    for one, other in zip(FREE, again, strict=True):
        np.testing.assert_array_equal(one.after, other.after)
        assert one.caption == other.caption
        assert cases.is_fit(one)


def test_a_control_image_is_the_silhouettes_edge() -> None:
    thing = SceneShape("square", "red", 32, 32, 12, 0)
    image = lessons.control_image([thing], 64)
    assert image.shape == (64, 64, 3)
    assert set(np.unique(image)) == {0, 255}
    filled = ndimage.binary_fill_holes(image[..., 0] > 0)
    np.testing.assert_array_equal(filled, lessons.silhouette([thing], 64))
    assert not image[32, 32].any()


def test_overlap_is_one_of_the_painted_silhouette_and_little_elsewhere() -> None:
    for scene in FREE:
        asked = lessons.silhouette(scene.asked, len(scene.mask))
        colour = np.median(scene.after[asked], axis=0).astype(np.uint8)
        elsewhere = np.where((scene.mask & ~asked)[..., None], colour, scene.before)
        assert lessons.overlap(elsewhere, scene) < 0.4
        assert lessons.changed_overlap(elsewhere, scene) < 0.1
        assert lessons.overlap(scene.before, scene) == 0
        assert lessons.overlap(scene.after, scene) > 0.95
        assert lessons.changed_overlap(scene.after, scene) > 0.8


def test_the_checker_still_knows_things_with_rims() -> None:
    for case in judging.additions(12):
        found = check(lessons.outlined(case.scene).after, case.bare, case.scene.mask)
        assert found.colour == case.slot.colour


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = card.AdapterCard(
        name="outline",
        kind=card.AdapterKind.CONTROLNET,
        does="paints",
        base_digest="0" * 12,
        command="none",
        seed=3,
        steps=5,
        sha256="0" * 64,
        size_bytes=7,
        measured={"overlap": 0.5},
    )
    made.write(tmp_path)
    assert card.read("outline", tmp_path) == made
    assert made.file == card.CONTROLNETS / "outline" / card.WEIGHTS
