"""The header of a file of safetensors, read without torch and judged within the store's limits."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from giornata.wire.errors import LoraTooLarge, LoraUnreadable
from giornata_lora_store.rules.headers import LoraHeader, LoraSizeLimits, TensorInfo, recognise_header

# The header of a file of safetensors, read without torch and without its tensors.


TENSOR_QUOTES: Final = 10
"""Quotes of a tensor in a header: two each of its name, its three fields and its dtype."""
OTHER_QUOTES: Final = 1 << 14
"""Quotes of a trainer's notes, which have about a hundred names; those within texts are escaped."""
LENGTH: Final = struct.Struct("<Q")
ACCEPTED: Final = "a whole file of safetensors"


def read_header(path: Path, limit_bytes: int, most_tensors: int) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in a file.

    The library reads the header into its own types, and refuses every other structure, before Python makes objects of
    it. It checks that tensors do not overlap, leave no hole and fill the file. It takes the last of two tensors with
    one name, so names are checked here.

    Raises:
        LoraUnreadable: it is no file of safetensors, or not a whole one.
        LoraTooLarge: its header is larger than `limit_bytes`, or has more than `most_tensors`.
    """
    text = _header_text(path, limit_bytes)
    quotes = text.count(b'"') - text.count(b'\\"')
    if quotes > (most := TENSOR_QUOTES * most_tensors + OTHER_QUOTES):
        raise LoraTooLarge(
            "The header has too many names.", received=f"{quotes} quotes", accepted=f"at most {most}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(text)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            return {name: TensorInfo(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise LoraUnreadable(received=str(error), accepted=ACCEPTED) from error


def _header_text(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        head = file.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise LoraUnreadable(received=f"{len(head)} bytes", accepted=ACCEPTED)
        (size_bytes,) = LENGTH.unpack(head)
        left = path.stat().st_size - LENGTH.size
        if size_bytes > left:
            received = f"a header of {size_bytes} bytes in {left} bytes"
            raise LoraUnreadable(
                "The file is not whole safetensors; maybe it is another format, such as a pickle.",
                received=received,
                accepted=ACCEPTED,
            )
        if size_bytes > limit_bytes:
            raise LoraTooLarge(
                "The header is too large.", received=f"{size_bytes} bytes", accepted=f"at most {limit_bytes}"
            )
        return file.read(size_bytes)


def _check_names(text: bytes) -> None:
    """ValueError where a map in a header has a name twice; what the maps hold is let go of at once."""

    def once_each(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ValueError(f"the name {twice!r} is given twice")

    json.loads(text, object_pairs_hook=once_each)


# What a file is, within the store's limits.


@dataclass(frozen=True)
class LoraHeaderInspector:
    """Reads headers; no tensor is read."""

    limits: LoraSizeLimits
    header_bytes: int

    def inspect(self, path: Path) -> LoraHeader:
        """Return what the header of a file says; raises as :func:`read_header` and :func:`recognised`. Blocking."""
        return recognise_header(read_header(path, self.header_bytes, self.limits.tensors), self.limits)
