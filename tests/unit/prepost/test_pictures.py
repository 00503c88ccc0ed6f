"""Every kind of picture becomes the right upright pixels or the right error, and pixels the file asked for."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from giornata.picture_files import MAX_ICC_BYTES, exif_orientation, picture_parts
from giornata.wire.errors import (
    GiornataError,
    ImageUnreadable,
    InvalidField,
    SizeMismatch,
    TooManyPixels,
    UnsupportedImageFormat,
)
from giornata.wire.requests import OutputFormat
from giornata_prepost.images.pictures import DecodedPicture, Pixels, decode, encode, flatten
from tests.examples import examples
from tests.unit.prepost.files import (
    ALPHA,
    JPEG,
    LIMIT,
    ORIENTED,
    PNG,
    RGB,
    RGBA,
    after_header,
    chunk,
    deep_png,
    pixels,
    png,
    saved,
    segment,
    tiff,
)


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


# Metadata turns a picture or is kept beside it, and never decides whether its pixels are read.


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_exif_turns_a_picture_upright(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(RGB, form, exif=exif)
    with Image.open(BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image)
    decoded = pixels(data)
    np.testing.assert_array_equal(decoded, np.asarray(expected.convert("RGB")))
    assert decoded.flags.c_contiguous


@pytest.mark.parametrize("name", ORIENTED)
def test_a_picture_is_turned_as_chromium_turns_it(name: str) -> None:
    """The browser itself is asked in tests/e2e/studio/test_drawing.py."""
    data, turned = ORIENTED[name]
    stored = pixels(PNG if name.startswith("PNG") else JPEG)
    if name.startswith("WebP"):
        with Image.open(BytesIO(data)) as image:
            stored = np.asarray(image)
    np.testing.assert_array_equal(pixels(data), np.rot90(stored, -1) if turned else stored)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_a_senseless_orientation_is_ignored(value: int) -> None:
    np.testing.assert_array_equal(pixels(after_header(PNG, chunk(b"eXIf", tiff(value)))), RGB)


@pytest.mark.parametrize("cut", range(len(tiff(6)) + 1))
def test_a_cut_exif_block_is_read_as_far_as_it_goes(cut: int) -> None:
    assert exif_orientation(tiff(6)[:cut]) == (6 if cut >= 22 else 1)


@pytest.mark.parametrize("start", [0, 7, 10, 100, 2**32 - 1])
def test_a_directory_that_lies_elsewhere_counts_as_none(start: int) -> None:
    assert exif_orientation(b"II*\0" + struct.pack("<I", start) + tiff(6)[8:]) == 1


LARGE = 2 * PngImagePlugin.MAX_TEXT_CHUNK
"""More than Pillow takes of one text, once it is unpacked."""
BROKEN = bytearray(chunk(b"tEXt", b"Comment\0spoilt on its way"))
BROKEN[-1] ^= 1
TEXTS = {
    "large zTXt": chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(LARGE), 1)),
    "large iTXt": chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(bytes(LARGE), 1)),
    "much tEXt": chunk(b"tEXt", b"k\0" + bytes(PngImagePlugin.MAX_TEXT_MEMORY // 4)) * 5,
    "bad checksum": bytes(BROKEN),
    "iCCP of an unknown method": chunk(b"iCCP", b"n\0\7junk"),
    "iCCP bomb": chunk(b"iCCP", b"n\0\0" + zlib.compress(bytes(2 * MAX_ICC_BYTES), 1)),
    "cut gAMA": chunk(b"gAMA", b"\0"),
    "cut cHRM": chunk(b"cHRM", b"\0"),
    "cut pHYs": chunk(b"pHYs", b"\0"),
    "damaged eXIf": chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff\x01"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("behind", [False, True], ids=["before the pixels", "behind them"])
def test_a_pngs_metadata_never_refuses_it(name: str, behind: bool) -> None:
    end = PNG.rindex(b"IEND") - 4
    data = PNG[:end] + TEXTS[name] + PNG[end:] if behind else after_header(PNG, TEXTS[name])
    decoded = decode(data, LIMIT)
    np.testing.assert_array_equal(decoded.pixels, RGB)
    assert decoded.icc_profile is None


@pytest.mark.parametrize(
    "damaged",
    [
        segment(0xE0, b"JFIF\0"),
        segment(0xEE, b"Adobe"),
        segment(0xE2, b"ICC_PROFILE\0"),
        segment(0xE2, b"ICC_PROFILE\0\1"),
        segment(0xE2, b"ICC_PROFILE\0\1\1part") * 300,
        segment(0xE2, b"MPF\0MM\0*\0\0\0\x08\0\1\xb0\1\0\4\0\0\0\1\0\0\0\2"),
        segment(0xED, b"Photoshop 3.0\x008BIM"),
        segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01"),
        segment(0xE1, b"Exif\0\0"),
        segment(0xFE, bytes(65000)) * 40,
    ],
    ids=[
        "JFIF",
        "Adobe",
        "ICC",
        "ICC number",
        "ICC parts",
        "MPF",
        "Photoshop",
        "EXIF",
        "no EXIF",
        "comments",
    ],
)
def test_a_jpegs_metadata_never_refuses_it(damaged: bytes) -> None:
    decoded = decode(JPEG[:2] + damaged + JPEG[2:], LIMIT)
    np.testing.assert_array_equal(decoded.pixels, pixels(JPEG))
    assert decoded.icc_profile is None


@pytest.mark.parametrize("length", [129, 1 << 20, (1 << 20) + 1, MAX_ICC_BYTES])
@pytest.mark.parametrize("form", OutputFormat)
def test_a_profile_of_4_mib_is_kept_in_every_format(form: OutputFormat, length: int) -> None:
    profile = bytes(16) + b"RGB " + np.random.default_rng(0).bytes(length - 20)
    once = decode(encode(DecodedPicture(RGB, profile), form), LIMIT)
    assert once.icc_profile == profile


@pytest.mark.parametrize("form", OutputFormat)
def test_a_larger_profile_is_dropped_and_the_picture_read(form: OutputFormat) -> None:
    data = encode(DecodedPicture(RGB, bytes(16) + b"RGB " + bytes(MAX_ICC_BYTES - 19)), form)
    decoded = decode(data, LIMIT)
    assert decoded.icc_profile is None
    assert decoded.pixels.shape == RGB.shape


def test_damage_to_what_pixels_need_is_not_passed_over() -> None:
    """A wrong checksum of a transparent colour is a wrong picture, which the decoder refuses."""
    clear = bytearray(chunk(b"tRNS", struct.pack(">HHH", 0, 0, 77)))
    clear[-1] ^= 1
    assert bytes(clear) in picture_parts(after_header(PNG, bytes(clear))).file


@pytest.mark.parametrize("data", [b"", b"RIFF", b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"text"])
def test_what_is_no_picture_is_left_to_the_decoder(data: bytes) -> None:
    assert picture_parts(data) == (data, 1, None)


# A damaged, hostile or foreign file is the right error and nothing worse.


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_truncated(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = saved(noise, form)
    with pytest.raises(ImageUnreadable) as caught:
        decode(data[: len(data) // 2], LIMIT, "mask")
    assert caught.value.field == "mask"


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0junk", b"RIFF\0\0\0\0WEBPVP8 nonsense"]
)
def test_a_head_without_a_body(data: bytes) -> None:
    with pytest.raises(ImageUnreadable):
        decode(data, LIMIT)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (saved(RGB, "GIF"), "GIF"),
        (saved(RGB, "BMP"), "BMP"),
        (saved(RGB, "TIFF"), "TIFF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns=''/>", "SVG"),
        (b"hello", "5 bytes"),
        (b"", "empty"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_content(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedImageFormat) as caught:
        decode(data, LIMIT)
    assert name in str(caught.value)
    assert "PNG, JPEG, WebP" in str(caught.value)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_animations_are_refused(form: str) -> None:
    frames = [Image.fromarray(RGB), Image.fromarray(255 - RGB)]
    with pytest.raises(UnsupportedImageFormat, match="animation"):
        decode(saved(frames[0], form, save_all=True, append_images=frames[1:]), LIMIT)


def test_a_jpeg_with_a_second_picture_is_read() -> None:
    """Phones write a preview or a depth map behind the photograph (MPO)."""
    frames = [Image.fromarray(RGB), Image.fromarray(255 - RGB)]
    decoded = pixels(saved(frames[0], "MPO", save_all=True, append_images=frames[1:], quality=95))
    assert np.abs(decoded.astype(int) - RGB).mean() < 10


@pytest.mark.parametrize(("width", "height"), [(1001, 1000), (100_000, 100_000), (2**31 - 1, 1)])
def test_bombs_are_refused_by_their_header(width: int, height: int) -> None:
    """There is no pixel in the file: a decoder that ran would say truncated."""
    with pytest.raises(TooManyPixels):
        decode(png(width, height, 8, 2, b""), LIMIT)


def test_a_webp_bomb_is_refused_by_its_header() -> None:
    size = struct.pack("<I", 16382)[:3] * 2
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + size + saved(RGB, "WEBP", lossless=True)[12:]
    with pytest.raises((TooManyPixels, ImageUnreadable)):
        decode(b"RIFF" + struct.pack("<I", len(body)) + body, LIMIT)


def test_the_limit_itself_is_accepted() -> None:
    assert decode(saved(RGB, "PNG"), RGB.shape[0] * RGB.shape[1]).pixels.shape == RGB.shape


def test_many_chunks_are_refused() -> None:
    data = saved(RGB, "PNG")
    with pytest.raises(ImageUnreadable, match="more than 32768 chunks"):
        decode(data[:33] + chunk(b"prVt", b"") * (1 << 15) + data[33:], LIMIT)


@pytest.mark.parametrize("scans", [True, False], ids=["scans", "segments"])
def test_many_scans_and_segments_are_refused(scans: bool) -> None:
    data = saved(RGB, "JPEG")
    repeated = segment(0xDA, b"\1\1\0\0\0\0") * 65 if scans else segment(0xFE, b"") * 4097
    with pytest.raises(ImageUnreadable, match="64 scans or 4096 segments"):
        decode(data[:2] + repeated + data[2:], LIMIT)


SAMPLES = [
    saved(RGB, "PNG"),
    saved(RGBA, "PNG"),
    saved(Image.fromarray(RGB).quantize(16), "PNG", transparency=3),
    deep_png(np.full((5, 5, 1), 300, np.uint16), 0),
    saved(RGB, "JPEG", exif=Image.Exif()),
    saved(RGB, "JPEG", progressive=True),
    saved(Image.fromarray(RGB).convert("CMYK"), "JPEG"),
    saved(RGBA, "WEBP"),
    saved(RGBA, "WEBP", lossless=True),
]


@examples(times=4)  # nine forms of files, most of whose damage is refused at once
@given(
    data=st.sampled_from(SAMPLES),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8),
    cut=st.floats(0.05, 1),
)
def test_damage_never_escapes_the_tree_of_errors(
    data: bytes, changes: list[tuple[float, int]], cut: float
) -> None:
    damaged = bytearray(data)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    try:
        decoded = decode(bytes(damaged[: int(cut * len(damaged))]), LIMIT)
    except GiornataError:
        return
    assert decoded.pixels.dtype == np.uint8
    assert decoded.pixels.shape[2] in (3, 4)
