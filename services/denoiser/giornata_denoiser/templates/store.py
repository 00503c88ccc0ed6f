"""The store of recordings in memory and on disk. Synchronous, and safe to use from several threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from giornata.residency.tiers import LoadedTier
from giornata.wire.workers import LoadSample, TemplateCounters, Tier
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.corrections import CorrectionCache
from giornata_denoiser.templates.disk import TemplateDiskTier
from giornata_denoiser.templates.first_templates import FirstTemplates
from giornata_denoiser.templates.identity import ORDINARY, HostMemory, picture_of

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
    `disk_bytes`, `host` and `told` are those of :class:`giornata_denoiser.templates.disk.TemplateDiskTier`.
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

    def counted(self) -> TemplateCounters:
        """The counters and sizes, as telemetry tells them."""
        with self._lock:
            sizes = {"memory_bytes": self._memory.size_bytes, "disk_bytes": self._disk.size_bytes}
            gone = {"evicted_memory": self._memory.evicted, "evicted_disk": self._disk.evicted}
        learned = {"corrected": self.corrections.served, "corrections_bytes": self.corrections.size_bytes}
        left = {"first": self.first.left, "first_bytes": self.first.size_bytes}
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
        """Load a recording that is on disk alone into memory; its pages are read ahead."""
        found, where = self._load(recording_id)
        if found is None or where is not DISK:
            return
        with self._lock:
            self.counters["prefetched"] += 1
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
