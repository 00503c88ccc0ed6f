"""Sizes of the model's picture and of the output."""

from __future__ import annotations

import math

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from giornata.wire.errors import SizeMismatch, TooManyPixels
from giornata_prepost.images.geometry import (
    ASPECT_TOLERANCE,
    Box,
    Size,
    crop_box,
    crop_size,
    crops_alike,
    model_size,
    output_size,
    same_aspect,
)
from giornata_prepost.images.masks import bounds

SIDES = st.integers(1, 20_000)
SIZES = st.builds(Size, SIDES, SIDES)
MEGAPIXEL = 1024 * 1024


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Size(1024, 1024), Size(1024, 1024)),
        (Size(2048, 2048), Size(1024, 1024)),
        (Size(3000, 3000), Size(1024, 1024)),
        (Size(1023, 700), Size(1008, 688)),
        (Size(512, 512), Size(512, 512)),
        (Size(4000, 3000), Size(1168, 880)),
        (Size(7, 5), Size(16, 16)),
        (Size(1, 20_000), Size(16, 20_000)),
        (Size(1, 200_000), Size(16, 65_536)),
    ],
    ids=str,
)
def test_model_size(picture: Size, expected: Size) -> None:
    assert model_size(picture, MEGAPIXEL, 16) == expected


@given(picture=SIZES, budget=st.integers(32 * 32, 2**23), multiple=st.sampled_from([8, 16, 32]))
def test_model_size_keeps_its_promises(picture: Size, budget: int, multiple: int) -> None:
    size = model_size(picture, budget, multiple)
    assert size.width % multiple == size.height % multiple == 0
    assert multiple <= size.width <= max(multiple, picture.width)
    assert multiple <= size.height <= max(multiple, picture.height)
    assert size.pixels <= max(budget, multiple**2)


def test_output_size_is_the_pictures_own_by_default() -> None:
    assert output_size(Size(321, 123), None, 1) == (321, 123)


@pytest.mark.parametrize(
    "requested", [Size(500, 375), Size(4000, 3000), Size(40, 30), Size(404, 300), Size(400, 306)], ids=str
)
def test_output_size_of_the_same_aspect(requested: Size) -> None:
    assert output_size(Size(400, 300), requested, 4000 * 3000) == requested


@pytest.mark.parametrize(
    "requested", [Size(1024, 1024), Size(300, 400), Size(410, 300), Size(400, 308)], ids=str
)
def test_output_size_of_another_aspect_is_refused_with_suggestions(requested: Size) -> None:
    with pytest.raises(SizeMismatch) as caught:
        output_size(Size(400, 300), requested, MEGAPIXEL)
    assert caught.value.accepted is not None
    assert caught.value.accepted.startswith("auto, ")
    for suggestion in caught.value.accepted.removeprefix("auto, ").split(" or "):
        width, height = map(int, suggestion.split("x"))
        assert output_size(Size(400, 300), Size(width, height), 2 * MEGAPIXEL) == (width, height)


def test_output_with_too_many_pixels_is_refused() -> None:
    with pytest.raises(TooManyPixels) as caught:
        output_size(Size(100, 100), Size(1000, 1000), 999_999)
    assert caught.value.field == "size"


@given(one=SIZES, other=SIZES)
def test_same_aspect_is_symmetric_and_within_tolerance(one: Size, other: Size) -> None:
    verdict = same_aspect(one, other)
    assert verdict == same_aspect(other, one)
    ratio = (one.width / one.height) / (other.width / other.height)
    assert verdict == (max(ratio, 1 / ratio) <= 1 + ASPECT_TOLERANCE) or math.isclose(
        max(ratio, 1 / ratio), 1.02
    )


@st.composite
def marked_pictures(draw: st.DrawFn) -> tuple[Size, Box]:
    """A picture and a box in it."""
    picture = Size(draw(st.integers(1, 300)), draw(st.integers(1, 300)))
    left, top = draw(st.integers(0, picture.width - 1)), draw(st.integers(0, picture.height - 1))
    width, height = (draw(st.integers(1, limit)) for limit in (picture.width - left, picture.height - top))
    return picture, Box(left, top, width, height)


@given(marked=marked_pictures(), padding=st.integers(0, 400))
def test_the_crop_is_diffusers_own_for_a_square(marked: tuple[Size, Box], padding: int) -> None:
    picture, box = marked
    mask = np.zeros((picture.height, picture.width), np.uint8)
    mask[box.window] = 255
    left, top, right, bottom = VaeImageProcessor.get_crop_region(Image.fromarray(mask), 512, 512, pad=padding)
    expected = (left, top, right - left, bottom - top)
    assert crop_box(bounds(mask > 0, padding), picture) == expected


@pytest.mark.parametrize(
    ("cut_out", "native", "budget", "expected"),
    [
        (Size(100, 100), 1024, MEGAPIXEL, Size(1024, 1024)),
        (Size(3000, 3000), 1024, MEGAPIXEL, Size(1024, 1024)),
        (Size(100, 100), 256, MEGAPIXEL, Size(256, 256)),
        (Size(100, 100), 1024, 512 * 512, Size(512, 512)),
        (Size(100, 100), 500, MEGAPIXEL, Size(496, 496)),
        (Size(400, 200), 1024, MEGAPIXEL, Size(1440, 720)),
        (Size(1, 1), 8, MEGAPIXEL, Size(16, 16)),
        (Size(1, 500), 64, MEGAPIXEL, Size(16, 256)),
    ],
    ids=str,
)
def test_crop_size(cut_out: Size, native: int, budget: int, expected: Size) -> None:
    assert crop_size(cut_out, native, budget, 16) == expected


@given(
    cut_out=st.builds(Size, st.integers(1, 4000), st.integers(1, 4000)),
    native=st.integers(1, 2048),
    budget=st.integers(1024, 1 << 22),
)
def test_crop_size_keeps_its_promises(cut_out: Size, native: int, budget: int) -> None:
    size = crop_size(cut_out, native, budget, 16)
    assert size.width % 16 == size.height % 16 == 0
    assert min(size) >= 16
    area = max(min(native**2, budget), 256)
    assert size.pixels <= area
    scale = math.sqrt(area / cut_out.pixels)
    for side, original in zip(size, cut_out, strict=True):
        if min(size) > 16:
            assert original * scale - 17 < side <= original * scale + 1e-6


@given(st.lists(marked_pictures(), min_size=1, max_size=4))
def test_crops_of_several_masks_are_computed_at_one_size(marked: list[tuple[Size, Box]]) -> None:
    picture = marked[0][0]
    boxes = [
        box
        for _, box in marked
        if box.left + box.width <= picture.width and box.top + box.height <= picture.height
    ]
    crops, size = crops_alike(boxes, picture, 64, MEGAPIXEL, 16)
    assert len(crops) == len(boxes)
    for crop, box in zip(crops, boxes, strict=True):
        assert 0 <= crop.left <= box.left
        assert 0 <= crop.top <= box.top
        assert box.left + box.width <= crop.left + crop.width <= picture.width
        assert box.top + box.height <= crop.top + crop.height <= picture.height
    if len(boxes) == 1:
        assert crops == (crop_box(boxes[0], picture),)
        assert size == crop_size(crops[0].size, 64, MEGAPIXEL, 16)
    elif any(
        crop_size(crop.size, 64, MEGAPIXEL, 16) != size for crop in (crop_box(box, picture) for box in boxes)
    ):
        for crop in crops:  # the picture's shape, to the pixel
            assert (
                abs(crop.width * picture.height - crop.height * picture.width)
                < picture.width + picture.height
            )
