"""Every kind of picture becomes the right upright pixels, and pixels the file that was asked for."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image, ImageCms

from giornata.wire.errors import InvalidField, SizeMismatch
from giornata.wire.requests import OutputFormat
from giornata_prepost.images.pictures import DecodedPicture, Pixels, decode, encode, flatten
from tests.unit.prepost.picture_files import ALPHA, LIMIT, RGB, RGBA, chunk, deep_png, pixels, png, saved


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.parametrize("original", [RGB, RGBA], ids=["RGB", "RGBA"])
def test_lossless_formats_come_back_exactly(form: str, original: Pixels) -> None:
    decoded = pixels(saved(original, form, lossless=True, exact=True))
    np.testing.assert_array_equal(decoded, original)
    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous


def test_jpeg_comes_back_nearly() -> None:
    decoded = pixels(saved(RGB, "JPEG", quality=95, subsampling=0))
    assert np.abs(decoded.astype(int) - RGB).max() <= 8


def test_grey_becomes_rgb() -> None:
    np.testing.assert_array_equal(pixels(saved(ALPHA, "PNG")), np.dstack([ALPHA] * 3))


def test_grey_with_alpha() -> None:
    image = Image.merge("LA", [Image.fromarray(RGB[..., 0]), Image.fromarray(ALPHA)])
    np.testing.assert_array_equal(pixels(saved(image, "PNG")), np.dstack([RGB[..., 0]] * 3 + [ALPHA]))


def test_one_bit() -> None:
    image = Image.fromarray(ALPHA >= 128)
    assert image.mode == "1"
    np.testing.assert_array_equal(
        pixels(saved(image, "PNG")), np.dstack([np.where(ALPHA >= 128, 255, 0)] * 3)
    )


def test_palette() -> None:
    image = Image.fromarray(RGB).quantize(16)
    np.testing.assert_array_equal(pixels(saved(image, "PNG")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("transparency", [3, bytes([255, 0, 128, 7])], ids=["index", "table"])
def test_palette_with_transparency(transparency: int | bytes) -> None:
    image = Image.fromarray((np.arange(24 * 16).reshape(16, 24) % 6).astype(np.uint8))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180])
    table = [255] * 6
    if isinstance(transparency, bytes):
        table[:4] = list(transparency)
    else:
        table[transparency] = 0
    decoded = pixels(saved(image, "PNG", transparency=transparency))
    assert decoded.shape == (16, 24, 4)
    for index in range(6):
        where = np.asarray(image) == index
        assert set(map(tuple, decoded[where])) == {(*(10 * (3 * index + c) for c in (1, 2, 3)), table[index])}


@pytest.mark.parametrize(
    ("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)], ids=["grey", "RGB", "grey+alpha", "RGBA"]
)
def test_16_bits_are_scaled_not_clipped(colour: int, channels: int) -> None:
    eight = np.random.default_rng(0).integers(0, 256, (9, 7, channels), np.uint8)
    eight[0, 0], eight[0, 1] = 0, 255
    decoded = pixels(deep_png(eight.astype(np.uint16) * 257, colour))
    grey = channels < 3
    expected = np.dstack([eight[..., :1]] * 3 + [eight[..., 1:]]) if grey else eight
    np.testing.assert_array_equal(decoded, expected)


def test_16_bits_grey_and_colour_agree() -> None:
    samples = np.random.default_rng(0).integers(0, 65536, (9, 7, 1), np.uint16)
    np.testing.assert_array_equal(
        pixels(deep_png(samples, 0)), pixels(deep_png(np.repeat(samples, 3, axis=2), 2))
    )


def test_transparent_colour_of_16_bit_grey_is_exact() -> None:
    samples = np.array([[[1000], [1001], [65535]]], np.uint16)
    decoded = pixels(deep_png(samples, 0, chunk(b"tRNS", struct.pack(">H", 1001))))
    np.testing.assert_array_equal(decoded[..., 3], [[255, 0, 255]])


def test_transparent_colour_of_16_bit_rgb() -> None:
    samples = np.array([[[0x1234, 0x5678, 0x9ABC], [0x3412, 0x7856, 0xBC9A]]], np.uint16)
    decoded = pixels(deep_png(samples, 2, chunk(b"tRNS", struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC))))
    np.testing.assert_array_equal(decoded[..., 3], [[0, 255]])
    np.testing.assert_array_equal(decoded[0, 1, :3], [0x34, 0x78, 0xBC])


def test_transparent_colour_of_8_bit_rgb() -> None:
    samples = np.array([[[1, 2, 3], [1, 2, 4]]], np.uint8)
    data = png(2, 1, 8, 2, samples.tobytes(), chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)))
    np.testing.assert_array_equal(pixels(data), [[[1, 2, 3, 0], [1, 2, 4, 255]]])


@pytest.mark.parametrize(("depth", "row", "clear"), [(1, 0b01000000, 1), (2, 0b00011011, 2), (4, 0x3A, 3)])
def test_transparent_colour_of_few_bits(depth: int, row: int, clear: int) -> None:
    count = min(8 // depth, 4)
    values = [row >> (8 - depth * (i + 1)) & (2**depth - 1) for i in range(count)]
    decoded = pixels(png(count, 1, depth, 0, bytes([row]), chunk(b"tRNS", struct.pack(">H", clear))))
    assert decoded[0, :, 0].tolist() == [value * 255 // (2**depth - 1) for value in values]
    assert decoded[0, :, 3].tolist() == [0 if value == clear else 255 for value in values]


def test_cmyk_jpeg_of_adobe_is_not_inverted() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = saved(cmyk, "JPEG", quality=100)
    assert b"Adobe" in data
    colour = pixels(data).reshape(-1, 3).mean(axis=0)
    assert colour[0] > 240
    assert colour[1:].max() < 15


@pytest.mark.parametrize(("form", "compression"), [(OutputFormat.PNG, None), (OutputFormat.WEBP, 100)])
@pytest.mark.parametrize("original", [RGB, RGBA], ids=["RGB", "RGBA"])
def test_lossless_encoding(form: OutputFormat, compression: int | None, original: Pixels) -> None:
    np.testing.assert_array_equal(pixels(encode(DecodedPicture(original), form, compression)), original)


@pytest.mark.parametrize("form", [OutputFormat.JPEG, OutputFormat.WEBP])
def test_compression_is_a_quality(form: OutputFormat) -> None:
    noise = DecodedPicture(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    lengths = [len(encode(noise, form, quality)) for quality in (0, 30, 60, 90, 99)]
    assert lengths == sorted(lengths)
    assert len(encode(noise, form)) == len(encode(noise, form, 95))


def test_jpeg_flattens_over_white() -> None:
    clear = np.zeros((16, 16, 4), np.uint8)
    assert pixels(encode(DecodedPicture(clear), OutputFormat.JPEG)).min() >= 254


@pytest.mark.parametrize(
    ("form", "compression"), [(OutputFormat.PNG, 50), (OutputFormat.JPEG, 101), (OutputFormat.WEBP, -1)]
)
def test_compression_that_does_not_apply_is_refused(form: OutputFormat, compression: int) -> None:
    with pytest.raises(InvalidField):
        encode(DecodedPicture(RGB), form, compression)


def test_a_side_too_long_for_the_format_is_refused() -> None:
    with pytest.raises(SizeMismatch, match="16383"):
        encode(DecodedPicture(np.zeros((1, 16_384, 3), np.uint8)), OutputFormat.WEBP)


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
