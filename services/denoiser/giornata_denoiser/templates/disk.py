"""The disk tier: recordings as files of one folder, least recently used out first.

A file is safetensors with a checksum; what is not whole, or not ours, is no recording. A file that is read stays
mapped, privately: its tensors are the file's pages, read once for the checksum or when a step first gathers from them,
shared with the system's cache instead of copied, and dropped from there first when memory is short. Files are replaced
and unlinked, never written in place, so that a recording outlives its file; another process that truncates a mapped
file ends this one, as with any mapped file.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from giornata.residency.tiers import FolderTier
from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, StoredTensor
from giornata_denoiser.templates.identity import HostMemory

FORMAT: Final = 1
"""Version of the files; a file of another version is not read."""
SUFFIX: Final = ".template.safetensors"

log = structlog.get_logger(__name__)


class TemplateFileInvalid(Exception):
    """A file is truncated, changed, of another format or of something else."""


class TemplateDiskTier(FolderTier):
    """Files of recordings, by the recording's id.

    A file is checked when it is first opened, and again only when another file has its name: a return from disk costs
    what is read of the file and no more.

    Args:
        folder: see :class:`giornata.residency.tiers.FolderTier`.
        budget_bytes: most bytes of all files.
        host: where what is read is to lie; where that is ordinary memory, it stays mapped.
        told: told how long each read took, in the reading thread.
    """

    def __init__(
        self,
        folder: Path | None,
        budget_bytes: int,
        *,
        host: HostMemory,
        told: Callable[[LoadSample], object],
    ) -> None:
        super().__init__(folder, budget_bytes, SUFFIX)
        self._host, self._told = host, told
        self._checked: dict[str, tuple[int, int, int]] = {}
        """The file of each recording that was found to be whole: inode, bytes, last change in nanoseconds."""

    def put(self, recording: CachedTemplate) -> None:
        """Write `recording`.

        Raises:
            OSError: it cannot be written.
        """
        if self.folder is not None:
            with self.writing(recording.id) as path:
                write_recording(recording, path)

    def remove(self, name: str) -> bool:
        """Remove a recording's file; returns whether it was here."""
        self._checked.pop(name, None)
        return super().remove(name)

    def read_ahead(self, recording_id: str) -> None:
        """Ask the system to read a file before it is needed; where it cannot, or the file is gone, that is no error."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError), self.path(recording_id).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def read(self, recording_id: str) -> CachedTemplate | None:
        """The recording in a file; None where the file cannot be read, or holds none and is removed."""
        try:
            return self._opened(self.path(recording_id), recording_id)
        except (TemplateFileInvalid, OSError) as error:
            log.warning("template_dropped", template=recording_id, error=str(error))
            self.remove(recording_id)
        except Exception:  # the edge of edits, such as no memory to pin: not the file's fault
            log.exception("template_not_read", template=recording_id)
        return None

    def _opened(self, path: Path, recording_id: str) -> CachedTemplate:
        began_s = time.perf_counter()
        found = path.stat()
        stamp = found.st_ino, found.st_size, found.st_mtime_ns
        recording = read_recording(path, recording_id, checked=self._checked.get(recording_id) == stamp)
        self._checked[recording_id] = stamp
        recording = self._host.recording(recording)
        load_ms = (time.perf_counter() - began_s) * 1e3
        self._told(LoadSample(tier=Tier.DISK, size_bytes=recording.size_bytes, load_ms=load_ms))
        return recording


def write_recording(recording: CachedTemplate, path: Path) -> None:
    """Write `recording` to `path`.

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
    try:
        save_file(tensors, path, metadata=header)
    except SafetensorError as error:  # what the library makes of the system's errors
        raise OSError(f"{path} cannot be written: {error}") from error


def read_recording(path: Path, recording_id: str, *, checked: bool = False) -> CachedTemplate:
    """The recording of this id in `path`, mapped; every byte is checked, unless this very file was `checked` before.

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
        raise TemplateFileInvalid(f"{path} is no recording: {error}") from error
    if recording is None:
        raise TemplateFileInvalid(f"{path} was changed, or is of another version or recording")
    return recording


def _named(recording: CachedTemplate) -> Iterator[tuple[str, Tensor]]:
    for number, entry in enumerate(recording.entries):
        for block, kept in enumerate(entry.blocks):
            for part, stored in vars(kept).items():
                for name, tensor in vars(stored).items() if stored is not None else ():
                    if tensor is not None:
                        yield f"{number}.{block}.{part}.{name}", tensor


def _recording(header: dict[str, str], tensors: dict[str, Tensor]) -> CachedTemplate:
    """The inverse of :func:`_named`."""
    kept: dict[tuple[int, int], dict[str, StoredTensor]] = {}
    ordered = sorted(tensors, key=lambda name: name.rpartition(".")[0])
    for place, names in groupby(ordered, key=lambda name: name.rpartition(".")[0]):
        number, block, part = place.split(".")
        stored = StoredTensor(**{name.rpartition(".")[2]: tensors[name] for name in names})
        kept.setdefault((int(number), int(block)), {})[part] = stored
    height, width = json.loads(header["grid"])
    levels: list[float] = json.loads(header["sigmas"])
    blocks: list[int] = json.loads(header["blocks"])
    entries = tuple(
        Entry(level, tuple(CachedBlock(**kept.get((number, block), {})) for block in range(count)))
        for number, (level, count) in enumerate(zip(levels, blocks, strict=True))
    )
    return CachedTemplate(header["id"], (int(height), int(width)), entries)


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the header and of every tensor's name, shape, dtype and bytes: against accidents, not attackers."""
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor: Any = tensors[name].detach().cpu()
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.view(torch.uint8).numpy().data, value)
    return value
