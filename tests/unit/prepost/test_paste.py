"""Compositing: nothing changes where alpha is 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.masks import Alpha, paste, place_painted, resize, resize_alpha
from giornata_prepost.images.pictures import Pixels


@st.composite
def edits(draw: st.DrawFn) -> tuple[Pixels, Alpha, Pixels]:
    """An original, an effective alpha with zeros, ones and a feather, a painted picture of another size."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    original = random.integers(0, 256, (height, width, draw(st.sampled_from([3, 4]))), np.uint8)
    alpha = random.uniform(-0.5, 1.5, (height, width)).clip(0, 1).astype(np.float32)
    painted = random.integers(0, 256, (draw(st.integers(1, 40)), draw(st.integers(1, 40)), 3), np.uint8)
    return original, alpha, painted


@given(edit=edits())
def test_a_painted_picture_is_seen_as_much_as_alpha_says(edit: tuple[Pixels, Alpha, Pixels]) -> None:
    """Not at all where it is 0, alone and opaque where it is 1, and else as the weighted mean of opaque pictures."""
    original, alpha, painted = edit
    before = original.copy()
    output = paste(original, alpha, painted)
    there = resize(painted, Size(original.shape[1], original.shape[0]))
    np.testing.assert_array_equal(original, before)
    assert output.shape == original.shape
    assert output.dtype == np.uint8
    np.testing.assert_array_equal(output[alpha == 0], original[alpha == 0])
    np.testing.assert_array_equal(output[alpha == 1][:, :3], there[alpha == 1])
    assert (output[alpha == 1][:, 3:] == 255).all()
    rgb = original[..., :3]
    opaque = paste(rgb, alpha, painted).astype(float)
    expected = rgb * (1 - alpha[..., None].astype(float)) + there.astype(float) * alpha[..., None]
    assert np.abs(opaque - expected).max() <= 0.5 + 1e-3
    rgba = paste(np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)]), alpha, painted)
    assert np.abs(rgba[..., :3] - opaque).max() <= 1
    assert (rgba[..., 3] == 255).all()


def test_colours_hidden_under_transparency_do_not_shine_through() -> None:
    hidden = np.zeros((1, 1, 4), np.uint8)
    hidden[..., 1] = 255
    red = np.array([[[255, 0, 0]]], np.uint8)
    assert paste(hidden, np.full((1, 1), 0.5, np.float32), red)[0, 0].tolist() == [255, 0, 0, 128]


def test_another_output_size_resizes_the_original_first() -> None:
    random = np.random.default_rng(0)
    original = random.integers(0, 256, (30, 40, 4), np.uint8)
    painted = random.integers(0, 256, (16, 16, 3), np.uint8)
    alpha = np.zeros((30, 40), np.float32)
    alpha[10:20, 10:20] = 1
    output = paste(original, alpha, painted, Size(80, 60))
    there = np.asarray(Image.fromarray(original).resize((80, 60), Image.Resampling.LANCZOS))
    scaled = resize_alpha(alpha, Size(80, 60))
    assert output.shape == (60, 80, 4)
    np.testing.assert_array_equal(output[scaled == 0], there[scaled == 0])
    assert (scaled[24:36, 24:36] == 1).all()
    assert (scaled[:16] == 0).all()


@given(scale=st.integers(1, 4), value=st.floats(0, 1, width=32))
def test_resized_alpha_stays_in_range(scale: int, value: float) -> None:
    alpha = np.full((8, 8), value, np.float32)
    alpha[:4] = 0
    for size in (Size(8 * scale, 8 * scale), Size(8 // scale, 8 // scale)):
        resized = resize_alpha(alpha, size)
        assert resized.dtype == np.float32
        assert resized.shape == (size.height, size.width)
        assert resized.min() >= 0
        assert resized.max() <= 1


@pytest.mark.parametrize("channels", [3, 4])
def test_nothing_is_resized_where_sizes_agree(channels: int) -> None:
    pixels = np.zeros((4, 5, channels), np.uint8)
    assert resize(pixels, Size(5, 4)) is pixels


@given(
    crop=st.builds(Box, st.integers(0, 30), st.integers(0, 20), st.integers(4, 40), st.integers(4, 30)),
    output=st.builds(Size, st.integers(20, 300), st.integers(20, 300)),
    painted=st.builds(Size, st.integers(4, 100), st.integers(4, 100)),
)
def test_a_crop_lands_where_it_was_cut(crop: Box, output: Size, painted: Size) -> None:
    """A ramp over the original, seen through the crop, is the same ramp over the output, to a level of its steps."""
    original = Size(70, 50)
    x = (crop.left + (np.arange(painted.width) + 0.5) / painted.width * crop.width) / original.width
    y = (crop.top + (np.arange(painted.height) + 0.5) / painted.height * crop.height) / original.height
    ramp = np.dstack(
        [np.tile(x, (painted.height, 1)), np.tile(y[:, None], (1, painted.width)), np.zeros(painted[::-1])]
    )
    place, pixels = place_painted((ramp * 255).round().astype(np.uint8), crop, original, output)
    assert pixels.shape == (place.height, place.width, 3)
    ends = [(crop.left, crop.left + crop.width), (crop.top, crop.top + crop.height)]
    for axis, limit in enumerate((original.width, original.height)):
        start, length, total = place[axis], place[axis + 2], output[axis]
        assert 0 <= start < start + length <= total
        there = (start + np.arange(length) + 0.5) / total
        expected = there.clip(ends[axis][0] / limit, ends[axis][1] / limit) * 255
        found = pixels.mean(axis=axis)[:, axis]
        step = 255 / limit * ((ends[axis][1] - ends[axis][0]) / painted[axis] + limit / total)
        assert np.abs(found - expected).max() <= step + 2
        assert start <= max(0, ends[axis][0] / limit * total - 1) + 1e-9  # the reach of resized alpha
        assert start + length >= min(total, ends[axis][1] / limit * total + 1) - 1e-9


def test_at_the_originals_size_a_crop_is_resized_to_its_box_and_no_more() -> None:
    painted = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    place, pixels = place_painted(painted, Box(5, 6, 32, 20), Size(70, 50), Size(70, 50))
    assert place == (5, 6, 32, 20)
    np.testing.assert_array_equal(pixels, resize(painted, Size(32, 20)))
