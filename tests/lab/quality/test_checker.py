"""The checker names what true renders show, and nothing that is not there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from giornata_lab.model.scenes import COLOURS, SHAPES, SceneTask, shapes
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_lab.quality.metrics import NOTHING, Pixels, check


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
