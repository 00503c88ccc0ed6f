"""Templates as files: safetensors with a checksum. What is not whole, or not ours, is no template.

A file that is read stays mapped, privately: its tensors are the file's pages, read once for the checksum or when a step
first gathers from them, shared with the system's cache instead of copied, and dropped from there first when memory is
short. Files are replaced and unlinked, never written in place, so that a template outlives its file; a file that
somebody else truncates while it is mapped ends the process, as any mapped file does.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from giornata_denoiser.rows.stored import Stored
from giornata_denoiser.rows.template import Entry, Kept, Template

FORMAT: Final = 1
"""Of the files; another one is not read."""
SUFFIX: Final = ".template.safetensors"
PART: Final = ".template.part"
"""Of files that are being written."""
TENSORS: Final = ("data", "scale", "low")


class Stamp(NamedTuple):
    """Tells a file from the one that later has its name."""

    inode: int
    size_bytes: int
    mtime_ns: int


class NotATemplate(Exception):
    """A file is truncated, changed, of another format or of something else."""


def write(template: Template, path: Path) -> int:
    """Write `template` to `path`, whole or not at all; returns the file's size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {name: tensor.contiguous() for name, tensor in _named(template)}
    header = {
        "format": str(FORMAT),
        "id": template.id,
        "grid": json.dumps(template.grid),
        "sigmas": json.dumps([entry.sigma for entry in template.entries]),
        "blocks": json.dumps([len(entry.blocks) for entry in template.entries]),
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
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def read_ahead(path: Path) -> None:
    """Ask the system to read a file before it is needed; where it cannot, or the file is gone, that is no error."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)


def read(path: Path, template_id: str, *, checked: bool = False) -> Template:
    """The template of this id in `path`, mapped.

    Args:
        path: of the file.
        template_id: that it is to hold.
        checked: whether this very file was read before; otherwise every byte is checked.

    Raises:
        NotATemplate: it is none.
        OSError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            header: dict[str, str] = dict(opened.metadata() or {})
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        found = int(header.pop("checksum"))
        ours = (header["format"], header["id"]) == (str(FORMAT), template_id)
        whole = ours and (checked or found == _checksum(header, tensors))
        template = _template(header, tensors) if whole else None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NotATemplate(f"{path} is no template: {error}") from error
    if template is None:
        raise NotATemplate(f"{path} was changed, or is of another version or template")
    return template


def _named(template: Template) -> Iterator[tuple[str, Tensor]]:
    for number, entry in enumerate(template.entries):
        for block, kept in enumerate(entry.blocks):
            for part in ("key", "value", "hidden"):
                stored = getattr(kept, part)
                for name in TENSORS if stored is not None else ():
                    tensor = getattr(stored, name)
                    if tensor is not None:
                        yield f"{number}.{block}.{part}.{name}", tensor


def _template(header: dict[str, str], tensors: dict[str, Tensor]) -> Template:
    """The inverse of :func:`_named`."""
    kept: dict[tuple[int, int], dict[str, Stored]] = {}
    ordered = sorted(tensors, key=lambda name: name.rpartition(".")[0])
    for place, names in groupby(ordered, key=lambda name: name.rpartition(".")[0]):
        number, block, part = place.split(".")
        stored = Stored(**{name.rpartition(".")[2]: tensors[name] for name in names})
        kept.setdefault((int(number), int(block)), {})[part] = stored
    height, width = json.loads(header["grid"])
    sigmas: list[float] = json.loads(header["sigmas"])
    blocks: list[int] = json.loads(header["blocks"])
    entries = tuple(
        Entry(sigma, tuple(Kept(**kept.get((number, block), {})) for block in range(count)))
        for number, (sigma, count) in enumerate(zip(sigmas, blocks, strict=True))
    )
    return Template(header["id"], (int(height), int(width)), entries)


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the header and of every tensor's name, shape, dtype and bytes: against accidents, not attackers."""
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor: Any = tensors[name].detach().cpu()
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.view(torch.uint8).numpy().data, value)
    return value
