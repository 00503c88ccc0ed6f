"""Sizes of the model's picture and of the output."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giornata.errors import SizeMismatch, TooManyPixels
from giornata_prepost.geometry import ASPECT_TOLERANCE, Size, model_size, output_size, same_aspect

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


@settings(deadline=None)
@given(picture=SIZES, budget=st.integers(32 * 32, 2**23), multiple=st.sampled_from([8, 16, 32]))
def test_model_size_keeps_its_promises(picture: Size, budget: int, multiple: int) -> None:
    size = model_size(picture, budget, multiple)
    assert size.width % multiple == size.height % multiple == 0
    assert multiple <= size.width <= max(multiple, picture.width)
    assert multiple <= size.height <= max(multiple, picture.height)
    assert size.pixels <= max(budget, multiple**2)


@settings(deadline=None)
@given(picture=st.builds(Size, st.integers(64, 9000), st.integers(64, 9000)))
def test_model_size_loses_less_than_a_multiple_a_side(picture: Size) -> None:
    scale = min(1.0, math.sqrt(MEGAPIXEL / picture.pixels))
    size = model_size(picture, MEGAPIXEL, 16)
    for side, original in zip(size, picture, strict=True):
        assert side == 16 or side > original * scale - 16 - 1e-6


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


@settings(deadline=None)
@given(one=SIZES, other=SIZES)
def test_same_aspect_is_symmetric_and_within_tolerance(one: Size, other: Size) -> None:
    verdict = same_aspect(one, other)
    assert verdict == same_aspect(other, one)
    ratio = (one.width / one.height) / (other.width / other.height)
    assert verdict == (max(ratio, 1 / ratio) <= 1 + ASPECT_TOLERANCE) or math.isclose(
        max(ratio, 1 / ratio), 1.02
    )
