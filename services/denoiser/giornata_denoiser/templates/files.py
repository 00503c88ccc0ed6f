"""Recordings as files: safetensors with a checksum. What is not whole, or not ours, is no recording.

A file that is read stays mapped, privately: its tensors are the file's pages, read once for the checksum or when a step
first gathers from them, shared with the system's cache instead of copied, and dropped from there first when memory is
short. Files are replaced and unlinked, never written in place, so that a recording outlives its file; another process
that truncates a mapped file ends this one, as with any mapped file.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from giornata_denoiser.rows.stored import Stored
from giornata_denoiser.rows.template import Entry, Kept, Recording

FORMAT: Final = 1
"""Version of the files; a file of another version is not read."""
SUFFIX: Final = ".template.safetensors"
PART: Final = ".template.part"
"""Ends the names of files that are being written."""
TENSORS: Final = ("data", "scale", "low")
Stamp = tuple[int, int, int]
"""Tells a file from a later file of its name: inode, bytes, and time of the last change in nanoseconds."""


class NotARecording(Exception):
    """A file is truncated, changed, of another format or of something else."""


def write(recording: Recording, path: Path) -> int:
    """Write `recording` to `path`, whole or not at all; returns the file's size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {name: tensor.contiguous() for name, tensor in _named(recording)}
    header = {
        "format": str(FORMAT),
        "id": recording.id,
        "grid": json.dumps(recording.grid),
        "sigmas": json.dumps([entry.level for entry in recording.entries]),
        "blocks": json.dumps([len(entry.blocks) for entry in recording.entries]),
    }
    header["checksum"] = str(_checksum(header, tensors))
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=PART)
    os.close(handle)
    beside = Path(name)
    try:
        save_file(tensors, beside, metadata=header)
        size = beside.stat().st_size
        beside.replace(path)
    except SafetensorError as error:  # what the library makes of the system's errors
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return size


def stamp(path: Path) -> Stamp:
    """Which file `path` is now; OSError if there is none."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_ahead(path: Path) -> None:
    """Ask the system to read a file before it is needed; where it cannot, or the file is gone, that is no error."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read(path: Path, recording_id: str, *, checked: bool = False) -> Recording:
    """The recording of this id in `path`, mapped.

    Args:
        path: of the file.
        recording_id: which recording the file is to hold.
        checked: whether this very file was read before; otherwise every byte is checked.

    Raises:
        NotARecording: the file does not hold it.
        OSError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            header: dict[str, str] = dict(opened.metadata() or {})
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        found = int(header.pop("checksum"))
        ours = (header["format"], header["id"]) == (str(FORMAT), recording_id)
        whole = ours and (checked or found == _checksum(header, tensors))
        recording = _recording(header, tensors) if whole else None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NotARecording(f"{path} is no recording: {error}") from error
    if recording is None:
        raise NotARecording(f"{path} was changed, or is of another version or recording")
    return recording


def _named(recording: Recording) -> Iterator[tuple[str, Tensor]]:
    for number, entry in enumerate(recording.entries):
        for block, kept in enumerate(entry.blocks):
            for part in ("key", "value", "hidden"):
                stored = getattr(kept, part)
                for name in TENSORS if stored is not None else ():
                    tensor = getattr(stored, name)
                    if tensor is not None:
                        yield f"{number}.{block}.{part}.{name}", tensor


def _recording(header: dict[str, str], tensors: dict[str, Tensor]) -> Recording:
    """The inverse of :func:`_named`."""
    kept: dict[tuple[int, int], dict[str, Stored]] = {}
    ordered = sorted(tensors, key=lambda name: name.rpartition(".")[0])
    for place, names in groupby(ordered, key=lambda name: name.rpartition(".")[0]):
        number, block, part = place.split(".")
        stored = Stored(**{name.rpartition(".")[2]: tensors[name] for name in names})
        kept.setdefault((int(number), int(block)), {})[part] = stored
    height, width = json.loads(header["grid"])
    levels: list[float] = json.loads(header["sigmas"])
    blocks: list[int] = json.loads(header["blocks"])
    entries = tuple(
        Entry(level, tuple(Kept(**kept.get((number, block), {})) for block in range(count)))
        for number, (level, count) in enumerate(zip(levels, blocks, strict=True))
    )
    return Recording(header["id"], (int(height), int(width)), entries)


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the header and of every tensor's name, shape, dtype and bytes: against accidents, not attackers."""
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor: Any = tensors[name].detach().cpu()
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.view(torch.uint8).numpy().data, value)
    return value
