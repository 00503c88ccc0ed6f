"""Where templates are: in memory, or on disk. Synchronous, and safe to use from several threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from giornata_denoiser.reuse import files
from giornata_denoiser.reuse.ledger import Ledger
from giornata_denoiser.reuse.template import Template

log = structlog.get_logger(__name__)

MEMORY: Final = "memory"
DISK: Final = "disk"
MISS: Final = "miss"


class TemplateStore:
    """Templates by id, in two tiers.

    What leaves memory stays on disk, if there is one; what leaves the disk is gone. A row that runs holds its template
    itself, so that no eviction ever changes a result; pins keep templates from being thrown out and loaded again.

    Args:
        memory_bytes: budget of the memory tier.
        folder: of the disk tier; its files are taken over, oldest use first. None for none.
        disk_bytes: budget of the disk tier.
    """

    def __init__(self, memory_bytes: int, folder: Path | None = None, disk_bytes: int = 0) -> None:
        self._lock = threading.Lock()
        self._memory = Ledger(memory_bytes)
        self._templates: dict[str, Template] = {}
        self._disk = Ledger(disk_bytes)
        self._folder = folder
        self.counters: Counter[str] = Counter()
        """Lookups by the tier that had it (`memory`, `disk`, `miss`), and `evicted_memory`, `evicted_disk`."""
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

    def find(self, template_id: str) -> Template | None:
        """From memory, or from disk into memory; reading takes as long as it takes."""
        with self._lock:
            found = self._templates.get(template_id)
            if found is not None:
                self._memory.use(template_id)
                self.counters[MEMORY] += 1
                return found
            there = template_id in self._disk
        found = self._read(template_id) if there else None
        with self._lock:
            self.counters[MISS if found is None else DISK] += 1
            if found is not None:
                self._keep(found)
                if template_id in self._disk:
                    self._disk.use(template_id)
        return found

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
        if there:
            self._path(template_id).unlink(missing_ok=True)
        return here or there

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

    def _keep(self, template: Template) -> None:
        self._templates[template.id] = template
        self._drop(self._memory.add(template.id, template.size_bytes))

    def _drop(self, gone: tuple[str, ...]) -> None:
        self.counters["evicted_memory"] += len(gone)
        for name in gone:
            self._templates.pop(name, None)

    def _read(self, template_id: str) -> Template | None:
        """From disk; a file that is no template is removed."""
        path = self._path(template_id)
        try:
            return files.read(path, template_id)
        except (files.NotATemplate, OSError) as error:
            log.warning("template_dropped", template=template_id, error=str(error))
            with self._lock:
                self._disk.remove(template_id)
            path.unlink(missing_ok=True)
            return None

    def _path(self, template_id: str) -> Path:
        if self._folder is None:
            raise ValueError("there is no disk tier")
        return self._folder / f"{template_id}{files.SUFFIX}"

    def _take_over(self, folder: Path) -> None:
        """What an earlier process left."""
        folder.mkdir(parents=True, exist_ok=True)
        found = [(path, path.stat()) for path in folder.glob(f"*{files.SUFFIX}")]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            for name in self._disk.add(path.name.removesuffix(files.SUFFIX), stat.st_size):
                self._path(name).unlink(missing_ok=True)
