"""Picture files of every kind, and what they are decoded to."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any, Final

import numpy as np
from PIL import Image

from giornata_prepost.images.pictures import Pixels, decode

LIMIT = 1_000_000
GRADIENT = np.stack(np.meshgrid(np.arange(0, 240, 10), np.arange(0, 160, 10)), axis=-1).astype(np.uint8)
RGB = np.dstack([GRADIENT, np.full(GRADIENT.shape[:2], 77, np.uint8)])
ALPHA = np.linspace(0, 255, RGB.shape[0] * RGB.shape[1]).reshape(RGB.shape[:2]).astype(np.uint8)
RGBA = np.dstack([RGB, ALPHA])


def saved(image: Image.Image | Pixels, form: str, **options: Any) -> bytes:
    target = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(target, form, **options)
    return target.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def tiff(orientation: int, kind: int = 3, count: int = 1, order: str = "<") -> bytes:
    """An EXIF block whose one entry is an orientation."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    return head + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, kind, count, orientation, 0, 0)


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG of any depth and colour type; `rows` without filter bytes."""
    stride = len(rows) // height if height and rows else 0
    raw = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height)) if rows else b""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )


def deep_png(samples: np.ndarray[Any, Any], colour: int, *extra: bytes) -> bytes:
    """16 bits a sample, (height, width, channels)."""
    return png(samples.shape[1], samples.shape[0], 16, colour, samples.astype(">u2").tobytes(), *extra)


def pixels(data: bytes) -> Pixels:
    return decode(data, LIMIT).pixels


# Files that say in many ways that they lie on their side, and whether Chromium 156 turns them.


PNG: Final = saved(RGB, "PNG")
JPEG: Final = saved(RGB, "JPEG")
XMP: Final = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def after_header(data: bytes, *parts: bytes) -> bytes:
    """A PNG or JPEG with `parts` before everything that it need not begin with."""
    at = 33 if data.startswith(b"\x89PNG") else 2
    return data[:at] + b"".join(parts) + data[at:]


def _exif(orientation: int = 6, **entry: Any) -> bytes:
    return segment(0xE1, b"Exif\0\0" + tiff(orientation, **entry))


def _webp(**options: Any) -> bytes:
    return saved(RGB, "WEBP", **options)


_EXIF: Final = Image.Exif()
_EXIF[0x0112] = 6
_SIDE: Final = chunk(b"eXIf", tiff(6))
_SPOILT: Final = _SIDE[:-1] + bytes([_SIDE[-1] ^ 1])
_PROFILE: Final = f"\nexif\n{len(tiff(6)) + 6:8}\n{(b'Exif' + bytes(2) + tiff(6)).hex()}\n".encode()
_END, _SCAN = PNG.rindex(b"IEND") - 4, JPEG.index(b"\xff\xda")

ORIENTED: Final[dict[str, tuple[bytes, bool]]] = {
    "PNG eXIf": (after_header(PNG, _SIDE), True),
    "PNG eXIf, big endian": (after_header(PNG, chunk(b"eXIf", tiff(6, order=">"))), True),
    "PNG eXIf with a JPEG's head": (after_header(PNG, chunk(b"eXIf", b"Exif\0\0" + tiff(6))), False),
    "PNG eXIf behind the pixels": (PNG[:_END] + _SIDE + PNG[_END:], False),
    "PNG eXIf of a wrong checksum": (after_header(PNG, _SPOILT), False),
    "PNG eXIf, and one upright": (after_header(PNG, _SIDE, chunk(b"eXIf", tiff(1))), True),
    "PNG eXIf upright, and one not": (after_header(PNG, chunk(b"eXIf", tiff(1)), _SIDE), False),
    "PNG raw profile": (
        after_header(PNG, chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(_PROFILE))),
        False,
    ),
    "PNG text named exif": (after_header(PNG, chunk(b"tEXt", b"exif\0Exif\0\0" + tiff(6))), False),
    "PNG XMP": (after_header(PNG, chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)), False),
    "JPEG EXIF": (after_header(JPEG, _exif()), True),
    "JPEG EXIF, big endian": (after_header(JPEG, _exif(order=">")), True),
    "JPEG EXIF right before the pixels": (JPEG[:_SCAN] + _exif() + JPEG[_SCAN:], True),
    "JPEG EXIF as LONG": (after_header(JPEG, _exif(kind=4)), False),
    "JPEG EXIF as BYTE": (after_header(JPEG, _exif(kind=1)), False),
    "JPEG EXIF of two values": (after_header(JPEG, _exif(count=2)), False),
    "JPEG EXIF, and one upright": (after_header(JPEG, _exif(), _exif(1)), True),
    "JPEG EXIF upright, and one not": (after_header(JPEG, _exif(1), _exif()), False),
    "JPEG EXIF damaged, and one not": (after_header(JPEG, segment(0xE1, b"Exif\0\0junk"), _exif()), False),
    "JPEG XMP": (after_header(JPEG, segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)), False),
    "WebP EXIF": (_webp(lossless=True, exif=_EXIF), False),
    "WebP EXIF, lossy": (_webp(exif=_EXIF), False),
    "WebP XMP": (_webp(lossless=True, xmp=XMP), False),
}
"""Name → the file, 24 x 16 pixels as stored, and whether it is shown turned clockwise."""
