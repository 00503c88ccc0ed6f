"""Recordings in memory and on disk, corrections, and what edits have left. Safe in several threads.

A file is safetensors with a checksum. What is read stays mapped, privately: its tensors are the file's pages. Files are
replaced and unlinked, never written in place, so that a recording outlives its file.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import groupby, islice
from operator import methodcaller
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from giornata.packed.packing import Region, unite_regions
from giornata.residency.tiers import FolderTier, LoadedTier
from giornata.wire.workers import LoadSample, TemplateCounters, Tier
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Correction, Entry, StoredTensor


class HostMemory(NamedTuple):
    """Puts what is kept where it is to lie. May copy, and so take long; safe in several threads."""

    recording: Callable[[CachedTemplate], CachedTemplate]
    correction: Callable[[Correction], Correction]


ORDINARY: Final = HostMemory(lambda recording: recording, lambda correction: correction)
"""As it comes: mapped from a file, or as a step has left it."""
PINNED: Final = HostMemory(methodcaller("pinned"), methodcaller("pinned"))
"""Pinned memory, from which a CUDA device reads asynchronously."""


def picture_of(recording_id: str) -> str:
    """The id of the picture of a recording."""
    return recording_id.partition("-")[0]


Corrections = tuple[Correction, ...]
"""One of each sequence of a row."""
TRIED: Final = 32
"""So many of a recording's corrections are tried for a mask that is new."""


EXPECTED: Final = 4096
"""Most values that are expected at a time."""
V = TypeVar("V")


class ExpectedTier(Generic[V]):
    """Values by name within `budget_bytes` of host memory, the least recently used out first.

    What is kept has been expected, and not removed since: an edit that runs when its picture is forgotten leaves
    nothing. Values lie where `host` puts them.
    """

    def __init__(
        self, budget_bytes: int, size_of: Callable[[V], int], *, host: HostMemory = ORDINARY
    ) -> None:
        self.budget_bytes: Final = budget_bytes
        """The most that may be kept."""
        self._tier: LoadedTier[V] = LoadedTier(budget_bytes, size_of)
        self._expected: OrderedDict[str, None] = OrderedDict()
        self._host = host
        self.kept = 0
        """How many were kept so far."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._tier.size_bytes

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of their last use."""
        return iter(self._tier)

    def expect(self, name: str) -> None:
        """An edit begins that will leave `name`. Those that never end are forgotten in their order."""
        with self._tier.lock:
            self._expected[name] = None
            self._expected.move_to_end(name)
            if len(self._expected) > EXPECTED:
                self._expected.popitem(last=False)

    def remove(self, name: str) -> None:
        """Remove what is kept, and expect it no more; edits that run with it go on."""
        with self._tier.lock:
            self._expected.pop(name, None)
            self._tier.remove(name)

    def remove_all(self, prefix: str) -> None:
        """Remove all whose names begin with `prefix`, and expect them no more."""
        with self._tier.lock:
            for name in [name for name in (*self._expected, *self._tier) if name.startswith(prefix)]:
                self.remove(name)

    def _keep(self, name: str, made: Callable[[], V]) -> None:
        """Keep what is `made`, if it is expected by then. May block."""
        try:
            value = made()
        except Exception:  # such as no memory there: another row may leave it
            with self._tier.lock:
                self._expected.pop(name, None)
            raise
        with self._tier.lock:
            if name in self._expected:
                del self._expected[name]
                self.kept += 1
                self._tier.keep(name, value)


class LearnedCorrections(NamedTuple):
    """The corrections that an edit has learned."""

    region: Region
    """Outside of which they correct."""
    corrections: Corrections

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(correction.size_bytes for correction in self.corrections)


class CorrectionCache(ExpectedTier[LearnedCorrections]):
    """Corrections by recording, mask, number of sequences, and LoRAs under which they were learned.

    `under` is what :meth:`giornata_denoiser.rows.parts.Adapters.learned_under` tells. The first edit's stay: those
    of other seeds and prompts are hardly better for the next one.
    """

    def __init__(self, budget_bytes: int, *, host: HostMemory = ORDINARY) -> None:
        super().__init__(budget_bytes, lambda entry: entry.size_bytes, host=host)
        self.served = 0
        """How many rows were given what an earlier one learned."""

    def find(self, recording_id: str, region: Region, sequences: int, under: str = "") -> Corrections | None:
        """Return what a row of so many sequences takes; None where no edit has learned it."""
        with self._tier.lock:
            found = self._tier.get(_name(recording_id, region, sequences, under))
            self.served += found is not None
        return None if found is None else found.corrections

    def nearest(self, recording_id: str, region: Region, sequences: int, under: str = "") -> Region | None:
        """The smallest region that holds `region` and for which :meth:`widened` has corrections; None where none has.

        It is `region` with that of another mask: what lies outside of both, an edit of the other has learned.
        """
        latest = self._latest(recording_id, sequences, under)
        unions = [unite_regions(region, kept.region) for _, kept in latest]
        found = [union for union in unions if union is not None]
        return min(found, key=lambda union: len(union.computed), default=None)

    def widened(
        self, recording_id: str, region: Region, sequences: int, under: str = ""
    ) -> Corrections | None:
        """Return what a row of a region of :meth:`nearest` takes; None where it has gone meanwhile.

        Copies at the first time, and keeps the copy.
        """
        found = self.find(recording_id, region, sequences, under)
        if found is not None:
            return found
        for source, kept in self._latest(recording_id, sequences, under):
            inside = torch.isin(kept.region.outside, region.outside)
            if int(inside.sum()) < len(region.outside):
                continue
            index = inside.nonzero().squeeze(1)
            made = self._placed(tuple(each.narrowed(index) for each in kept.corrections))
            with self._tier.lock:
                self.served += 1
                if source in self._tier:  # else its template was removed meanwhile
                    name = _name(recording_id, region, sequences, under)
                    self._tier.keep(name, LearnedCorrections(region, made))
            return made
        return None

    def claim(self, row: Row) -> bool:
        """Whether `row` brings corrections that are not here and would fit; who is told so calls :meth:`keep`."""
        name = _name_of(row)
        if name is None or sum(each.size_bytes for each in row.reuse.corrections or ()) > self.budget_bytes:
            return False
        with self._tier.lock:
            new = name not in self._tier and name not in self._expected
            if new:
                self.expect(name)
        return new

    def keep(self, row: Row) -> None:
        """Keep the corrections of a claimed `row`, unless its template was removed meanwhile. Pinning blocks."""
        name, corrections, region = _name_of(row), row.reuse.corrections, row.region
        if name is None or corrections is None or region is None:
            raise ValueError(f"row {row.key} has no corrections")
        self._keep(name, lambda: LearnedCorrections(region, self._placed(corrections)))

    def _latest(self, recording_id: str, sequences: int, under: str) -> list[tuple[str, LearnedCorrections]]:
        """Return what is kept for rows of so many sequences, the last used :data:`TRIED`, the latest first."""
        prefix, suffix = f"{recording_id}/", f"/{sequences}/{under}"
        with self._tier.lock:
            names = (n for n in reversed(tuple(self._tier)) if n.startswith(prefix) and n.endswith(suffix))
            kept = [(name, self._tier.peek(name)) for name in islice(names, TRIED)]
        return [(name, entry) for name, entry in kept if entry is not None]

    def _placed(self, corrections: Corrections) -> Corrections:
        return tuple(map(self._host.correction, corrections))


def _name(recording_id: str, region: Region, sequences: int, under: str) -> str:
    return f"{recording_id}/{region.digest.hex()}/{sequences}/{under}"


def _name_of(row: Row) -> str | None:
    if row.reuse.template is None or row.region is None or row.reuse.corrections is None:
        return None
    if any(each.group for each in row.reuse.corrections):  # it is a part of what they are
        return None
    under = row.adapters.learned_under(row.step - 1)  # in the step behind it
    return None if under is None else _name(row.reuse.template.id, row.region, len(row.inputs.prompts), under)


class FirstTemplates(ExpectedTier[CachedTemplate]):
    """Templates that edits have left of pictures without a recording, by name.

    One shows the picture outside of what its edit repainted (:attr:`CachedTemplate.edited`), at the noise levels of
    that edit's steps in full.
    """

    def __init__(self, budget_bytes: int, *, host: HostMemory = ORDINARY) -> None:
        super().__init__(budget_bytes, lambda left: left.size_bytes, host=host)

    def holds(self, recording: CachedTemplate) -> bool:
        """Return whether this very recording is here."""
        return any(self._tier.peek(name) is recording for name in self._tier)

    def find(self, name: str) -> CachedTemplate | None:
        """Return what an edit has left; None where none has, or it had to go."""
        return self._tier.get(name)

    def keep(self, row: Row) -> None:
        """Keep what an edit that is done has left, if it is expected still, whole and finite. Pinning blocks.

        Whole is what was recorded at every step that was to be in full: a row that failed on the way leaves less.
        """
        if row.records is None or row.region is None:
            raise ValueError(f"row {row.key} leaves nothing")
        name = row.records.name
        # Each has a name of its own as a recording, since what edits learn belongs to it and not to a later one.
        left = CachedTemplate(
            f"{name}-{row.key.job_id}",
            row.grid,
            row.entries,
            edited=row.region,
            noise=row.inputs.conditioning["noise"],
        )
        if len(left.entries) >= row.steps_in_full and left.finite:
            self._keep(name, lambda: self._host.recording(left))


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


MEMORY: Final = "hits_memory"
DISK: Final = "hits_disk"
FIRST: Final = "hits_first"
MISS: Final = "misses"
LISTED: Final = 256
"""Pictures of each tier that telemetry lists."""


class TemplateStore:
    """Recordings by id, in two tiers.

    What leaves memory stays on disk, if there is one; what leaves the disk is gone. A running row holds its recording
    itself, so that no eviction changes a result; pins keep recordings from being thrown out and loaded again. What
    comes from disk stays mapped and counts as memory. Beside them are the corrections that edits have learned, within
    `corrections_bytes`, and what edits have left of pictures without a recording, within `first_bytes`. `folder`,
    `disk_bytes`, `host` and `told` are those of :class:`giornata_denoiser.templates.store.TemplateDiskTier`.
    """

    def __init__(
        self,
        memory_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
        *,
        corrections_bytes: int = 0,
        first_bytes: int = 0,
        host: HostMemory = ORDINARY,
        told: Callable[[LoadSample], object] = lambda _: None,
    ) -> None:
        self._memory: LoadedTier[CachedTemplate] = LoadedTier(
            memory_bytes, lambda recording: recording.size_bytes
        )
        self._lock = self._memory.lock
        self.host: Final = host
        """Where recordings are to lie."""
        self._disk = TemplateDiskTier(folder, disk_bytes, host=host, told=told)
        self.corrections = CorrectionCache(corrections_bytes, host=host)
        self.first = FirstTemplates(first_bytes, host=host)
        self.counters: Counter[str] = Counter()
        """Lookups and prefetches, by field of :class:`giornata.wire.workers.TemplateCounters`."""
        self._prefetched: set[str] = set()
        """Recordings in memory that no lookup has found since they came from disk."""

    def counted(self) -> TemplateCounters:
        """The counters and sizes, as telemetry tells them."""
        with self._lock:
            sizes = {"memory_bytes": self._memory.size_bytes, "disk_bytes": self._disk.size_bytes}
            gone = {"evicted_memory": self._memory.evicted, "evicted_disk": self._disk.evicted}
        learned = {"corrected": self.corrections.served, "corrections_bytes": self.corrections.size_bytes}
        left = {"first": self.first.kept, "first_bytes": self.first.size_bytes}
        return TemplateCounters.model_validate({**self.counters, **gone, **sizes, **learned, **left})

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Pictures whose recordings are here, the last used first, at most :data:`LISTED` a tier."""
        with self._lock:
            memory = (*self.first, *self._memory)
            tiers = {Tier.MEMORY: memory, Tier.DISK: tuple(self._disk)}
        return {
            tier: tuple(islice(dict.fromkeys(map(picture_of, reversed(names))), LISTED))
            for tier, names in tiers.items()
            if names
        }

    def size_of(self, recording_id: str) -> int | None:
        """Bytes of a recording in memory, or of its file where it is on disk alone; None where it is nowhere."""
        with self._lock:
            found = self._memory.size_of(recording_id)
            return self._disk.size_of(recording_id) if found is None else found

    def find(self, recording_id: str, first: str | None = None) -> CachedTemplate | None:
        """The recording from memory, or from disk into memory, else the `first` template. Blocks while a file is read.

        A recording makes the first template superfluous.
        """
        found, where = self._load(recording_id)
        if first is not None and found is not None:
            self.first.remove(first)
        elif first is not None and (found := self.first.find(first)) is not None:
            where = FIRST
        with self._lock:
            if recording_id in self._prefetched:
                self._prefetched.remove(recording_id)
                where = DISK if where is MEMORY else where
            self.counters[where] += 1
        return found

    def has(self, recording: CachedTemplate) -> bool:
        """Return whether later edits may find this recording."""
        return (
            self.first.holds(recording)
            if recording.edited is not None
            else self.size_of(recording.id) is not None
        )

    def prefetch(self, recording_id: str) -> None:
        """Load a recording that is on disk alone into memory; its pages are read ahead.

        The lookup for which it is loaded counts as one on disk.
        """
        found, where = self._load(recording_id)
        if found is None or where is not DISK:
            return
        with self._lock:
            self.counters["prefetched"] += 1
            self._prefetched = {name for name in self._prefetched if name in self._memory} | {recording_id}
        self._disk.read_ahead(recording_id)

    def put(self, recording: CachedTemplate) -> None:
        """Keep a recording in memory and on disk.

        Raises:
            OSError: it cannot be written to disk; memory has it.
        """
        self._memory.keep(recording.id, recording)
        self._disk.put(recording)

    def remove(self, recording_id: str) -> bool:
        """Remove a recording from both tiers; whether it was in one. Rows that run with it go on."""
        with self._lock:
            here = self._memory.remove(recording_id)
            there = self._disk.remove(recording_id)
        return here or there

    def remove_all(self, prefix: str) -> None:
        """Remove every recording whose id begins with `prefix`, and what edits have learned from it."""
        with self._lock:
            names = {name for tier in (self._memory, self._disk) for name in tier if name.startswith(prefix)}
        for name in names:
            self.remove(name)
        self.corrections.remove_all(prefix)
        self.first.remove_all(prefix)

    def pinned(self, recording_id: str) -> AbstractContextManager[None]:
        """Keep a recording in memory within the context, from when it is there."""
        return self._memory.pinned(recording_id)

    def _load(self, recording_id: str) -> tuple[CachedTemplate | None, str]:
        """The recording, and which counter its lookup belongs to."""

        def read() -> CachedTemplate | None:
            return self._disk.read(recording_id) if recording_id in self._disk else None

        found = self._memory.load(recording_id, read, partial(self._disk.use, recording_id))
        if found.value is None:
            return None, MISS
        return found.value, DISK if found.loaded else MEMORY
