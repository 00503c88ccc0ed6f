"""Metadata turns a picture or is kept beside it, and never decides whether its pixels are read."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from giornata.picture_files import MAX_ICC_BYTES, exif_orientation, picture_parts
from giornata.wire.requests import OutputFormat
from giornata_prepost.images.pictures import DecodedPicture, decode, encode
from tests.unit.prepost.oriented_files import JPEG, ORIENTED, PNG, after_header
from tests.unit.prepost.picture_files import LIMIT, RGB, chunk, pixels, saved, segment, tiff


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
