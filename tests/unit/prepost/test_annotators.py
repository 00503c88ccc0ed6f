"""What annotators draw of pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter, label

from giornata.wire.adapters import Annotator
from giornata_prepost.images.conditions import ANNOTATORS, CANNY_HIGH, CANNY_LOW, canny, soft_edge, tile

Picture = np.ndarray[Any, np.dtype[np.uint8]]


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    """Smooth noise, with steps."""
    height, width = (draw(st.integers(2, 6)) * 8 for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    noise = gaussian_filter(
        random.uniform(-600, 900, (height, width, 3)), (draw(st.floats(0.5, 4)),) * 2 + (0,)
    )
    noise[: height // 2] += draw(st.integers(0, 200))
    clipped: Picture = noise.clip(0, 255).astype(np.uint8)
    return clipped


def step(low: int, high: int, channels: tuple[int, ...] = (0, 1, 2)) -> Picture:
    """64 x 64 pixels; from column 32 on `channels` are `high`."""
    pixels = np.full((64, 64, 3), low, np.uint8)
    for channel in channels:
        pixels[:, 32:, channel] = high
    return pixels


@pytest.mark.parametrize("annotator", Annotator)
@given(picture=pictures())
def test_a_picture_becomes_one_of_its_size_always_the_same(annotator: Annotator, picture: Picture) -> None:
    before = picture.copy()
    made = ANNOTATORS[annotator](picture)
    assert made.shape == picture.shape
    assert made.dtype == np.uint8
    assert np.array_equal(picture, before)
    assert np.array_equal(made, ANNOTATORS[annotator](picture))
    plain = np.full_like(picture, 90)
    assert np.array_equal(ANNOTATORS[annotator](plain), plain if annotator is Annotator.TILE else 0 * plain)


def gradients(picture: Picture) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sobel's, by hand; 0 on the border."""
    from PIL import Image  # noqa: PLC0415 - of this oracle alone

    grey = np.asarray(Image.fromarray(picture).convert("L")).astype(float)
    found = np.zeros(grey.shape)
    for y in range(1, grey.shape[0] - 1):
        for x in range(1, grey.shape[1] - 1):
            near = grey[y - 1 : y + 2, x - 1 : x + 2]
            across = (near[:, 2] - near[:, 0]) @ [1, 2, 1]
            down = (near[2] - near[0]) @ [1, 2, 1]
            found[y, x] = np.hypot(across, down)
    return found


@given(picture=pictures())
def test_each_line_of_canny_is_steep_and_somewhere_steeper(picture: Picture) -> None:
    edges, steep = canny(picture)[..., 0], gradients(picture)
    assert set(np.unique(edges)) <= {0, 255}
    assert (steep[edges > 0] >= CANNY_LOW - 0.1).all()
    lines, count = label(edges > 0, np.ones((3, 3)))
    # of a line's pixels that were thinned away, none is lost by hysteresis: the steepest one kept counts
    assert all(steep[lines == line].max() >= CANNY_HIGH - 0.1 for line in range(1, count + 1))


@pytest.mark.parametrize(("height", "seen"), [(20, False), (51, True), (255, True)])
def test_canny_draws_a_line_along_a_step_of_enough_height(height: int, seen: bool) -> None:
    """Two pixels wide, since both beside a sharp step are as steep."""
    edges = canny(step(0, height))[1:-1, :, 0]
    expected = np.zeros_like(edges)
    expected[:, [31, 32]] = 255 if seen else 0
    assert np.array_equal(edges, expected)


@pytest.mark.parametrize("channels", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("height", [10, 60, 120])
def test_a_soft_edge_is_twice_as_high_as_the_step_of_any_colour(
    height: int, channels: tuple[int, ...]
) -> None:
    edges = soft_edge(step(40, 40 + height, channels))[32, :, 0].astype(int)
    assert abs(edges.max() - 2 * height) <= 0.06 * 2 * height + 1
    assert set(np.flatnonzero(edges == edges.max())) == {31, 32}
    assert edges[:24].max() == edges[40:].max() == 0
    assert (np.diff(edges[:32]) >= 0).all()


def test_soft_edges_are_cut_at_white() -> None:
    assert soft_edge(step(0, 255)).max() == 255


@given(picture=pictures())
def test_a_tile_keeps_averages_and_loses_what_is_finer(picture: Picture) -> None:
    height, width, _ = picture.shape
    squares = picture.reshape(height // 8, 8, width // 8, 8, 3).mean(axis=(1, 3))
    fine = np.indices(picture.shape[:2]).sum(axis=0)[..., None] % 2
    board = np.where(fine, 255, 0).astype(np.uint8).repeat(3, axis=2)
    assert np.ptp(tile(board)) <= 1
    flat = np.repeat(np.repeat(squares, 8, axis=0), 8, axis=1).round().astype(np.uint8)
    worst = 1.0  # averages may be rounded apart; then each direction's negative lobes, and its rounding
    for _ in range(2):
        worst = worst * 1.3 + 1
    assert np.abs(tile(flat).astype(int) - tile(picture)).max() <= worst
