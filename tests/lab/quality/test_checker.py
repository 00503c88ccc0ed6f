"""The checker names what true renders show, and nothing that is not there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from giornata_lab.model.scenes import COLOURS, SHAPES, SceneTask, shapes
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_lab.quality.checker import NOTHING, check
from giornata_lab.quality.metrics import Pixels


@pytest.fixture(scope="module")
def some() -> list[QualityCase]:
    """Additions, among them every colour and every shape."""
    found = [draw(slot) for slot in spread([s for s in slots() if s.task is SceneTask.ADD], 48)]
    assert {c.slot.colour for c in found} == set(COLOURS)
    assert {c.slot.shape for c in found} == set(SHAPES)
    return found


@pytest.mark.slow
def test_colour_and_shape_of_true_renders_are_right() -> None:
    additions = spread([s for s in slots() if s.task is SceneTask.ADD], 320)
    wrong = []
    for slot in additions:
        case = draw(slot)
        found = check(case.scene.after, case.bare, case.scene.mask)
        if not found.is_a(slot.colour, slot.shape):
            wrong.append((slot.name, found))
    assert len(wrong) <= 0.02 * len(additions), wrong


def test_a_soft_and_noisy_render_is_named_as_well(some: list[QualityCase]) -> None:
    noise = np.random.default_rng(0)
    right = 0
    for case in some:
        blurred = np.asarray(Image.fromarray(case.scene.after).filter(ImageFilter.GaussianBlur(1.2)))
        edit = (blurred + noise.normal(0, 8, blurred.shape)).clip(0, 255).astype(np.uint8)
        edit = np.where(case.scene.mask[..., None], edit, case.scene.after)
        right += check(edit, case.bare, case.scene.mask).is_a(case.slot.colour, case.slot.shape)
    assert right >= 0.95 * len(some)


def test_an_unchanged_patch_shows_nothing(some: list[QualityCase]) -> None:
    for case in some:
        assert check(case.scene.before, case.bare, case.scene.mask) == NOTHING
        assert not check(case.scene.before, case.bare, case.scene.mask).is_a(
            case.slot.colour, case.slot.shape
        )


def test_a_slightly_noisy_ground_shows_nothing(some: list[QualityCase]) -> None:
    noise = np.random.default_rng(0)
    for case in some:
        edit = (case.bare + noise.normal(0, 5, case.bare.shape)).clip(0, 255).astype(np.uint8)
        assert check(edit, case.bare, case.scene.mask) == NOTHING


def test_another_colour_or_shape_is_not_what_was_asked_for(some: list[QualityCase]) -> None:
    """The same scene, but the thing has the next colour, or the next shape, of the list."""
    colours, wrong = list(COLOURS), 0
    for case in some[::4]:
        slot = case.slot
        recoloured = draw(replace(slot, colour=colours[(colours.index(slot.colour) + 1) % len(colours)]))
        reshaped = draw(replace(slot, shape=SHAPES[(SHAPES.index(slot.shape) + 1) % len(SHAPES)]))
        for other in (recoloured, reshaped):
            found = check(other.scene.after, other.bare, other.scene.mask)
            wrong += found.is_a(slot.colour, slot.shape)
    assert wrong == 0


def test_what_happens_outside_the_mask_is_not_looked_at(some: list[QualityCase]) -> None:
    for case in some[:8]:
        edit = np.where(case.scene.mask[..., None], case.scene.before, 255 - case.scene.before)
        assert check(edit, case.bare, case.scene.mask) == NOTHING


def on_flat(*boxes: tuple[slice, slice]) -> tuple[Pixels, Pixels]:
    """(edit, bare): red boxes on gray."""
    bare = np.full((128, 128, 3), 150, np.uint8)
    edit = bare.copy()
    for box in boxes:
        edit[box] = COLOURS["red"]
    return edit, bare


ALL = np.ones((128, 128), bool)


def test_one_box_is_a_square_and_two_are_none() -> None:
    one, two = (slice(20, 60), slice(20, 60)), (slice(70, 110), slice(70, 110))
    assert check(*on_flat(one), ALL).is_a("red", "square")
    assert check(*on_flat(one, two), ALL).shape is None


def test_a_long_bar_is_none_of_the_shapes() -> None:
    found = check(*on_flat((slice(60, 70), slice(10, 118))), ALL)
    assert found.colour == "red"
    assert found.shape is None
    assert found.area_px == 10 * 108


def test_a_colour_far_from_every_name_has_none() -> None:
    edit, bare = on_flat((slice(40, 90), slice(40, 90)))
    edit[40:90, 40:90] = (0, 255, 0)
    assert check(edit, bare, ALL).colour is None


@pytest.mark.parametrize("kind", ["box", "ellipse", "brush"])
def test_a_flooded_mask_shows_no_shape(kind: str) -> None:
    """Else every box would pass for a square and every ellipse for a circle."""
    mask = {
        "box": shapes.box(128, 60, 64, 30, 27),
        "ellipse": shapes.ellipse(128, 60, 64, 32, 29),
        "brush": shapes.brush(np.random.default_rng(0), 128, 60, 64, 32),
    }[kind]
    bare = np.full((128, 128, 3), 150, np.uint8)
    edit = bare.copy()
    edit[mask] = COLOURS["red"]
    found = check(edit, bare, mask)
    assert (found.colour, found.shape) == ("red", None)


def test_noise_over_the_whole_patch_has_no_colour() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    mask = np.zeros((128, 128), bool)
    mask[30:100, 20:80] = True
    assert check(noise, np.full_like(noise, 128), mask).colour is None


def test_a_ring_keeps_its_hole_and_a_speck_of_noise_makes_none(some: list[QualityCase]) -> None:
    case = next(c for c in some if c.slot.shape == "circle")
    (thing,) = case.scene.asked
    edit = case.scene.after.copy()
    y, x = round(thing.y), round(thing.x)
    edit[y : y + 2, x : x + 2] = case.bare[y : y + 2, x : x + 2]
    assert check(edit, case.bare, case.scene.mask).shape == "circle"
    g = np.arange(len(edit)) + 0.5
    hole = (g[:, None] - thing.y) ** 2 + (g - thing.x) ** 2 < (0.55 * thing.radius) ** 2
    edit[hole] = case.bare[hole]
    assert check(edit, case.bare, case.scene.mask).shape == "ring"


def test_a_mask_filled_with_gray_noise_is_no_gray_square() -> None:
    """What a model paints that knows nothing."""
    noise = np.random.default_rng(0).normal(140, 35, (128, 128, 3)).clip(0, 255).astype(np.uint8)
    bare = np.full_like(noise, 220)
    mask = np.zeros((128, 128), bool)
    mask[40:80, 30:70] = True
    assert not check(noise, bare, mask).is_a("gray", "square")
