"""Pixels become files of the asked format, quality and profile."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageCms

from giornata.wire.errors import (
    InvalidField,
    SizeMismatch,
)
from giornata.wire.requests import OutputFormat
from giornata_prepost.pictures import Picture, Pixels, decode, encode, flatten
from tests.unit.prepost.drawn import LIMIT, RGB, RGBA, pixels, saved


@pytest.mark.parametrize(("form", "compression"), [(OutputFormat.PNG, None), (OutputFormat.WEBP, 100)])
@pytest.mark.parametrize("original", [RGB, RGBA], ids=["RGB", "RGBA"])
def test_lossless_encoding(form: OutputFormat, compression: int | None, original: Pixels) -> None:
    np.testing.assert_array_equal(pixels(encode(Picture(original), form, compression)), original)


@pytest.mark.parametrize("form", [OutputFormat.JPEG, OutputFormat.WEBP])
def test_compression_is_a_quality(form: OutputFormat) -> None:
    noise = Picture(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    lengths = [len(encode(noise, form, quality)) for quality in (0, 30, 60, 90, 99)]
    assert lengths == sorted(lengths)
    assert len(encode(noise, form)) == len(encode(noise, form, 95))


def test_jpeg_flattens_over_white() -> None:
    clear = np.zeros((16, 16, 4), np.uint8)
    assert pixels(encode(Picture(clear), OutputFormat.JPEG)).min() >= 254


@pytest.mark.parametrize(
    ("form", "compression"), [(OutputFormat.PNG, 50), (OutputFormat.JPEG, 101), (OutputFormat.WEBP, -1)]
)
def test_compression_that_does_not_apply_is_refused(form: OutputFormat, compression: int) -> None:
    with pytest.raises(InvalidField):
        encode(Picture(RGB), form, compression)


def test_a_side_too_long_for_the_format_is_refused() -> None:
    with pytest.raises(SizeMismatch, match="16383"):
        encode(Picture(np.zeros((1, 16_384, 3), np.uint8)), OutputFormat.WEBP)


@pytest.mark.parametrize("form", OutputFormat)
def test_an_rgb_profile_is_carried_over(form: OutputFormat) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    picture = decode(saved(RGB, "PNG", icc_profile=profile), LIMIT)
    np.testing.assert_array_equal(picture.pixels, RGB)
    assert decode(encode(picture, form), LIMIT).icc_profile == profile


def test_a_profile_of_another_colour_space_is_dropped() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert decode(saved(RGB, "PNG", icc_profile=profile), LIMIT).icc_profile is None


@pytest.mark.parametrize("alpha", [0, 1, 127, 128, 254, 255])
def test_flatten_is_exact(alpha: int) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    flat = flatten(np.dstack([levels] * 3 + [np.full_like(levels, alpha)]))
    expected = np.floor((np.arange(256) * alpha + 255 * (255 - alpha)) / 255 + 0.5)
    np.testing.assert_array_equal(flat[0, :, 0], expected)


def test_flatten_leaves_opaque_pixels() -> None:
    mixed = RGBA.copy()
    mixed[3, 3, 3] = 255
    np.testing.assert_array_equal(flatten(mixed)[3, 3], RGB[3, 3])

    assert flatten(RGB) is RGB
