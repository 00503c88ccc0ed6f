"""A damaged, hostile or foreign file is the right error and nothing worse."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from giornata.wire.errors import GiornataError, ImageUnreadable, TooManyPixels, UnsupportedImageFormat
from giornata_prepost.images.pictures import decode
from tests.examples import examples
from tests.unit.prepost.picture_files import LIMIT, RGB, RGBA, chunk, deep_png, pixels, png, saved, segment


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
