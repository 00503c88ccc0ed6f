"""What the demo edits."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import label

from giornata_lab.demo.exhibits import (
    BESIDE_THE_ASTRONAUT,
    adapter_exhibits,
    by_words,
    exhibits,
    paint,
    smooth,
)
from giornata_lab.model.adapters.card import FOLDER


def test_the_spline_runs_through_every_point() -> None:
    curve = smooth(BESIDE_THE_ASTRONAUT, per_segment=4)
    assert len(curve) == 4 * len(BESIDE_THE_ASTRONAUT)
    np.testing.assert_allclose(curve[::4], BESIDE_THE_ASTRONAUT, atol=1e-12)


def test_the_spline_of_points_on_a_circle_stays_near_the_circle() -> None:
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    curve = np.array(smooth([(float(np.cos(a)), float(np.sin(a))) for a in angles]))
    np.testing.assert_allclose(np.hypot(*curve.T), 1, atol=0.005)


def test_a_mask_is_one_blob_and_no_box() -> None:
    mask = np.asarray(paint(512, 512, BESIDE_THE_ASTRONAUT)) > 0
    _, blobs = label(mask)
    assert blobs == 1
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    assert 0.5 < mask.sum() / box < 0.9


def test_a_mask_scales_with_the_picture() -> None:
    small, large = (paint(*size, BESIDE_THE_ASTRONAUT) for size in ((128, 96), (512, 384)))
    assert small.size == (128, 96)
    assert small.mode == "L"
    assert abs(np.asarray(small).mean() - np.asarray(large).mean()) < 1


def test_two_photographs_and_two_scenes_one_of_them_a_removal() -> None:
    shown = exhibits()
    assert [e.name for e in shown] == ["astronaut", "coffee", "scene", "removal"]
    assert [e.parameters.prompt for e in shown][:2] == ["a red star", "a white diamond"]
    assert shown[3].parameters.prompt == "remove it"
    for exhibit in shown:
        assert exhibit.picture.mode == "RGB"
        assert exhibit.mask.size == exhibit.picture.size
        assert 0.005 < np.asarray(exhibit.mask).mean() / 255 < 0.2


def test_words_name_one_of_several_things_which_the_mask_shows() -> None:
    shown = by_words()
    assert shown.parameters.mask_prompt == "the red circle"
    mask = np.asarray(shown.mask) > 0
    red, green, blue = np.asarray(shown.picture).astype(int)[mask].T
    assert np.mean((red > 150) & (green < 90) & (blue < 90)) > 0.97, "all of it is red, but for its soft edge"
    red, green, blue = np.asarray(shown.picture).astype(int)[~mask].T
    assert np.mean((red > 150) & (green < 90) & (blue < 90)) < 0.01, "and nothing else is"
    _, blobs = label(mask)
    assert blobs == 1


def test_the_exhibits_are_equal_at_every_call() -> None:
    for one, other in zip((*exhibits(), by_words()), (*exhibits(), by_words()), strict=True):
        assert one.picture.tobytes() == other.picture.tobytes()
        assert one.mask.tobytes() == other.mask.tobytes()


def test_every_adapter_that_ships_is_shown() -> None:
    shown = {each.adapter.name: each for each in adapter_exhibits()}
    assert set(shown) == {path.stem for path in (FOLDER / "cards").iterdir()}
    assert [name for name, each in shown.items() if each.control is not None] == ["outline"]


def test_the_outline_lies_in_the_mask_which_does_not_tell_its_place() -> None:
    (shown,) = [each for each in adapter_exhibits() if each.control is not None]
    mask, line = np.asarray(shown.exhibit.mask) > 0, np.asarray(shown.control)[..., 0] > 0
    assert line.any()
    assert (mask | ~line).all()
    box = [np.flatnonzero(part.any(axis=axis)) for part in (mask, line) for axis in (0, 1)]
    (mask_x, mask_y, line_x, line_y) = [(found[0] + found[-1]) / 2 for found in box]
    assert np.hypot(mask_x - line_x, mask_y - line_y) > 2
