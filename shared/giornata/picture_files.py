"""Parts of a picture file that are read besides its pixels: the orientation and the colour profile.

Whatever decodes pictures reads them through here, so that all see a picture as a browser's page shows it
(docs/adr/0016-masks-and-pixels.md). No other metadata reaches a decoder, which might fail on it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_ICC_BYTES: Final = 4 << 20
MAX_CHUNKS: Final = 1 << 15
"""Most chunks of a PNG that are looked at."""
MAX_SCANS: Final = 64
"""Most scans of a progressive JPEG, which usually has ten: the decoder goes over the whole picture for each."""
MAX_SEGMENTS: Final = 4096

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS: Final = (b"tRNS", b"acTL", b"fcTL", b"fdAT")
"""Ancillary chunks that change what is seen: transparent colours and animation."""
_READ_CHUNKS: Final = (b"eXIf", b"iCCP")
_MARKER: Final = re.compile(rb"\xff([^\xff\x00\x01\xd0-\xd8])")
"""What begins a segment of a JPEG; restart markers and stuffed bytes begin none."""
_COLOUR_SEGMENTS: Final = {0xE0: (b"JFIF\0", 14), 0xEE: (b"Adobe", 12), 0xE2: (b"ICC_PROFILE\0", 14)}
"""Markers of what says what a JPEG's colours are → how it begins, and the fewest bytes that decoders understand."""
_ORIENTATION: Final = 0x0112
_SHORT: Final = 3


class PictureParts(NamedTuple):
    """A picture file without its metadata, and the metadata that counts."""

    file: bytes
    """What decoders need: the pixels, how they are packed, their transparency and the frames of an animation."""
    orientation: int = 1
    """EXIF's number, 1 to 8, of the turn that makes the pixels upright."""
    icc_profile: bytes | None = None
    """A PNG's, of at most :data:`MAX_ICC_BYTES`; decoders find it in other files."""


def picture_parts(data: bytes) -> PictureParts:
    """The parts of a PNG or JPEG; any other file as it is, and upright.

    The orientation is that of a PNG's first ``eXIf`` chunk before its pixels, or of a JPEG's first EXIF segment.
    Damaged metadata counts as none; damage elsewhere is left to the decoder.

    Raises:
        ValueError: it has more than :data:`MAX_CHUNKS`, :data:`MAX_SCANS` or :data:`MAX_SEGMENTS`.
    """
    if data.startswith(_PNG):
        return _parts_of_png(data)
    return _parts_of_jpeg(data) if data.startswith(b"\xff\xd8") else PictureParts(data)


def exif_orientation(tiff: bytes) -> int:
    """The orientation that an EXIF block says in its first directory, as one SHORT of 1 to 8; else 1."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, values, value = struct.unpack_from(f"{order}HHIH", tiff, at)
        if tag == _ORIENTATION:
            return value if (kind, values) == (_SHORT, 1) and 1 <= value <= 8 else 1
    return 1


def _parts_of_png(data: bytes) -> PictureParts:
    view, kept, read = memoryview(data), list[bytes | memoryview]([_PNG]), dict[bytes, bytes]()
    pixels = False
    for number, (kind, start, stop) in enumerate(_chunks(data)):
        if number == MAX_CHUNKS:
            raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
        pixels = pixels or kind == b"IDAT"
        if not kind.isalpha() or kind[:1].isupper() or kind in _PIXEL_CHUNKS:
            kept.append(view[start:stop])
        elif not pixels and kind in _READ_CHUNKS and kind not in read:
            read[kind] = _content(view[start:stop])
    orientation = exif_orientation(read.get(b"eXIf", b""))
    return PictureParts(b"".join(kept), orientation, _inflated_profile(read.get(b"iCCP", b"")))


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, where it begins, where it ends) of each chunk of a PNG up to IEND; the last may be cut."""
    at, kind = len(_PNG), b""
    while at < len(data) and kind != b"IEND":
        start, kind = at, data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        yield kind, start, at


def _content(chunk: memoryview) -> bytes:
    """The content of a chunk; nothing where its checksum is wrong."""
    return bytes(chunk[8:-4]) if zlib.crc32(chunk[4:-4]).to_bytes(4, "big") == chunk[-4:] else b""


def _inflated_profile(content: bytes) -> bytes | None:
    """The profile of an ``iCCP`` chunk: its name, a zero, the method 0, and deflated bytes."""
    _, _, packed = content.partition(b"\0")
    inflater = zlib.decompressobj()
    try:
        profile = inflater.decompress(packed[1:], MAX_ICC_BYTES + 1)
    except zlib.error:
        return None
    return profile if packed[:1] == b"\0" and inflater.eof and len(profile) <= MAX_ICC_BYTES else None


def _parts_of_jpeg(data: bytes) -> PictureParts:
    kept, kept_to, before, exif, scans = list[bytes](), 0, 2, b"", 0
    for number, (marker, start, stop) in enumerate(_segments(data)):
        scans += marker == 0xDA
        if number == MAX_SEGMENTS or scans > MAX_SCANS:
            raise ValueError(f"it has more than {MAX_SCANS} scans or {MAX_SEGMENTS} segments")
        if start > before and scans <= (marker == 0xDA):  # fill bytes, which decoders read one by one
            kept.append(data[kept_to:before])
            kept_to = start
        before = stop
        if marker != 0xFE and not 0xE0 <= marker <= 0xEF:
            continue
        content = data[start + 4 : stop]
        if marker == 0xE1 and not exif and not scans and content.startswith(b"Exif\0\0"):
            exif = content[6:] or b"\0"
        beginning, least = _COLOUR_SEGMENTS.get(marker, (b"", 1 << 16))
        if len(content) < least or not content.startswith(beginning):
            kept.append(data[kept_to:start])
            kept_to = stop
    return PictureParts(b"".join((*kept, data[kept_to:])), exif_orientation(exif))


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, where it begins, where it ends) of each segment of a JPEG up to the end of its first picture.

    Segments of previews that lie within segments are passed over.
    """
    at = 0
    while (found := _MARKER.search(data, at)) is not None and found[1] != b"\xd9":
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
        yield found[1][0], found.start(), at
