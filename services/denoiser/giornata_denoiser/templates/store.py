"""Where templates are: in memory, or on disk. Synchronous, and safe to use from several threads."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

import structlog

from giornata.wire.workers import LoadSample, TemplateCounters, Tier
from giornata_denoiser.blocks.ledger import Ledger
from giornata_denoiser.rows.template import Template
from giornata_denoiser.templates import files

log = structlog.get_logger(__name__)

MEMORY: Final = "memory"
DISK: Final = "disk"
MISS: Final = "miss"
LISTED: Final = 256
"""Pictures of each tier that telemetry lists."""
READS: Final = 16
"""Reads from disk that telemetry tells at a time."""


class TemplateStore:
    """Templates by id, in two tiers.

    What leaves memory stays on disk, if there is one; what leaves the disk is gone. A row that runs holds its template
    itself, so that no eviction ever changes a result; pins keep templates from being thrown out and loaded again.

    What comes from disk stays mapped (:mod:`giornata_denoiser.templates.files`) and counts as memory. A file is checked
    when it is first opened, and again only when it is another one than was checked: a return from disk costs what is
    read of it and no more. Who asks for what is being read waits for that.

    Args:
        memory_bytes: budget of the memory tier.
        folder: of the disk tier; its files are taken over, oldest use first. None for none.
        disk_bytes: budget of the disk tier.
        pin: keep what comes from disk in pinned memory, not mapped: a CUDA device reads it asynchronously.
    """

    def __init__(
        self, memory_bytes: int, folder: Path | None = None, disk_bytes: int = 0, *, pin: bool = False
    ) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._memory = Ledger(memory_bytes)
        self._templates: dict[str, Template] = {}
        self._disk = Ledger(disk_bytes)
        self._folder = folder
        self._checked: dict[str, files.Stamp] = {}
        """By template: the file that was found to be whole."""
        self._reading: dict[str, Future[Template | None]] = {}
        self._reads: deque[LoadSample] = deque(maxlen=READS)
        self.counters: Counter[str] = Counter()
        """Lookups by the tier that had it (`memory`, `disk`, `miss`), `prefetched`, and `evicted_` with the tier."""
        if folder is not None:
            self._take_over(folder)

    @property
    def memory_bytes(self) -> int:
        """In the memory tier."""
        with self._lock:
            return self._memory.size_bytes

    @property
    def disk_bytes(self) -> int:
        """In the disk tier."""
        with self._lock:
            return self._disk.size_bytes

    def counted(self) -> TemplateCounters:
        """The counters and sizes, as telemetry tells them."""
        with self._lock:
            count = self.counters
            return TemplateCounters(
                hits_memory=count[MEMORY],
                hits_disk=count[DISK],
                misses=count[MISS],
                prefetched=count["prefetched"],
                evicted_memory=count["evicted_memory"],
                evicted_disk=count["evicted_disk"],
                memory_bytes=self._memory.size_bytes,
                disk_bytes=self._disk.size_bytes,
            )

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Pictures of the templates that are here, the last used first, at most :data:`LISTED` a tier."""
        with self._lock:
            return {
                tier: tuple(islice(dict.fromkeys(_picture(name) for name in reversed(tuple(names))), LISTED))
                for tier, names in ((Tier.MEMORY, self._memory), (Tier.DISK, self._disk))
                if len(names)
            }

    def taken_reads(self) -> tuple[LoadSample, ...]:
        """How long the latest reads from disk took; each is told once."""
        with self._lock:
            taken = tuple(self._reads)
            self._reads.clear()
        return taken

    def size_of(self, template_id: str) -> int | None:
        """Bytes of a template that is here, of its file where it is on disk alone; None of one that is not."""
        with self._lock:
            found = self._memory.size_of(template_id)
            return self._disk.size_of(template_id) if found is None else found

    def find(self, template_id: str) -> Template | None:
        """From memory, or from disk into memory; reading takes as long as it takes."""
        found, where = self._load(template_id)
        with self._lock:
            self.counters[where] += 1
        return found

    def prefetch(self, template_id: str) -> None:
        """From disk into memory, where it is on disk alone; its pages are read ahead."""
        found, where = self._load(template_id)
        if found is None or where is not DISK:
            return
        with self._lock:
            self.counters["prefetched"] += 1
        files.read_ahead(self._path(template_id))

    def put(self, template: Template) -> None:
        """Into memory, and to disk."""
        with self._lock:
            self._keep(template)
        if self._folder is None:
            return
        path = self._path(template.id)
        size = files.write(template, path)
        with self._lock:
            gone = self._disk.add(template.id, size)
            self.counters["evicted_disk"] += len(gone)
        for name in gone:
            self._path(name).unlink(missing_ok=True)

    def remove(self, template_id: str) -> bool:
        """From both tiers; whether it was in one. Rows that run with it go on."""
        with self._lock:
            here = self._memory.remove(template_id)
            self._templates.pop(template_id, None)
            there = self._disk.remove(template_id)
            self._checked.pop(template_id, None)
        if there:
            self._path(template_id).unlink(missing_ok=True)
        return here or there

    def remove_all(self, prefix: str) -> None:
        """Every template whose id begins with `prefix`, from both tiers."""
        with self._lock:
            names = {name for tier in (self._memory, self._disk) for name in tier if name.startswith(prefix)}
        for name in names:
            self.remove(name)

    def __contains__(self, template_id: object) -> bool:
        with self._lock:
            return template_id in self._templates or template_id in self._disk

    @contextmanager
    def pinned(self, template_id: str) -> Iterator[None]:
        """Keep it in memory meanwhile, from when it is there."""
        with self._lock:
            self._memory.pin(template_id)
        try:
            yield
        finally:
            with self._lock:
                self._drop(self._memory.unpin(template_id))

    def _load(self, template_id: str) -> tuple[Template | None, str]:
        """The template, and the tier that had it; read by one thread, whoever asks meanwhile."""
        with self._lock:
            found = self._templates.get(template_id)
            if found is not None:
                self._memory.use(template_id)
                return found, MEMORY
            if template_id not in self._disk:
                return None, MISS
            reading = self._reading.get(template_id)
            if reading is None:
                mine = self._reading[template_id] = Future()
        if reading is not None:
            found = reading.result()
            return found, MISS if found is None else MEMORY
        try:
            found = self._read(template_id)
        finally:
            with self._lock:
                del self._reading[template_id]
                if found is not None and template_id in self._disk:  # or it was removed meanwhile
                    self._keep(found)
                    self._disk.use(template_id)
            mine.set_result(found)
        return found, MISS if found is None else DISK

    def _keep(self, template: Template) -> None:
        self._templates[template.id] = template
        self._drop(self._memory.add(template.id, template.size_bytes))

    def _drop(self, gone: tuple[str, ...]) -> None:
        self.counters["evicted_memory"] += len(gone)
        for name in gone:
            self._templates.pop(name, None)

    def _read(self, template_id: str) -> Template | None:
        """From disk; a file that is no template is removed, and one that cannot be read into memory is not there."""
        path = self._path(template_id)
        try:
            return self._opened(path, template_id)
        except (files.NotATemplate, OSError) as error:
            log.warning("template_dropped", template=template_id, error=str(error))
            with self._lock:
                self._disk.remove(template_id)
                self._checked.pop(template_id, None)
            path.unlink(missing_ok=True)
        except Exception:  # the edge of edits, such as no memory to pin: not the file's fault
            log.exception("template_not_read", template=template_id)
        return None

    def _opened(self, path: Path, template_id: str) -> Template:
        began_s = time.perf_counter()
        stamp = files.stamp(path)
        template = files.read(path, template_id, checked=self._checked.get(template_id) == stamp)
        self._checked[template_id] = stamp
        if self._pin:
            template = template.pinned()
        load_ms = (time.perf_counter() - began_s) * 1e3
        read = LoadSample(tier=Tier.DISK, size_bytes=template.size_bytes, load_ms=load_ms)
        with self._lock:
            self._reads.append(read)
        return template

    def _path(self, template_id: str) -> Path:
        if self._folder is None:
            raise ValueError("there is no disk tier")
        return self._folder / f"{template_id}{files.SUFFIX}"

    def _take_over(self, folder: Path) -> None:
        """What an earlier process left."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{files.PART}"):  # of a process that ended while it wrote
            path.unlink(missing_ok=True)
        found = [(path, path.stat()) for path in folder.glob(f"*{files.SUFFIX}")]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            for name in self._disk.add(path.name.removesuffix(files.SUFFIX), stat.st_size):
                self._path(name).unlink(missing_ok=True)


def _picture(template_id: str) -> str:
    """Of :func:`giornata.wire.templates.picture_id`."""
    return template_id.partition("-")[0]
