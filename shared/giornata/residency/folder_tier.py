"""A tier of limited size that keeps files in a folder, the least recently used out first.

Recordings, LoRAs and text parts of LoRAs use the same. Synchronous, and safe to use from several threads.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from giornata.residency.tiers import EvictionLedger

PART: Final = ".part"
"""Ends the names of files that are being written."""


class FolderTier:
    """Files by name within a budget. They are replaced and unlinked, never written in place.

    Files that an earlier process left are taken over, the oldest use first; what it left half written is removed.

    Args:
        folder: made if need be; None for a tier that holds nothing.
        budget_bytes: most bytes of files that are not pinned.
        suffix: ends the names of the tier's files, each of which is called by what is before.
    """

    def __init__(self, folder: Path | None, budget_bytes: int, suffix: str) -> None:
        self.folder: Final = folder
        self.evicted = 0
        """Files that had to go since the start."""
        self._suffix, self._part = suffix, suffix.removesuffix(".safetensors") + PART
        self._lock = threading.Lock()
        """Held while files appear and go, never while one is written or read."""
        self._ledger = EvictionLedger(budget_bytes)
        if folder is not None:
            self._take_over(folder)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._ledger

    def __iter__(self) -> Iterator[str]:
        """Names in the order of last use, the oldest first."""
        with self._lock:
            return iter(tuple(self._ledger))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._ledger.size_bytes

    def size_of(self, name: str) -> int | None:
        """Bytes of a file; None where it is not here."""
        with self._lock:
            return self._ledger.size_of(name)

    def path(self, name: str) -> Path:
        """Return where the file of a name lies, or would."""
        if self.folder is None:
            raise ValueError("there is no disk tier")
        return self.folder / f"{name}{self._suffix}"

    def use(self, name: str) -> bool:
        """Use a file now; returns whether it is here."""
        with self._lock:
            return self._ledger.use(name)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path for the file of `name`, which appears whole when the context ends, and used last; or not at all."""
        handle, part_name = tempfile.mkstemp(dir=self.folder, suffix=self._part)
        os.close(handle)
        part = Path(part_name)
        try:
            yield part
            with self._lock:
                size_bytes = part.stat().st_size
                part.replace(self.path(name))
                self._unlink(self._ledger.add(name, size_bytes))
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """Keep a file within the context, from when it is there."""
        with self._lock:
            self._ledger.pin(name)
        try:
            yield
        finally:
            with self._lock:
                self._unlink(self._ledger.unpin(name))

    def remove(self, name: str) -> bool:
        """Remove a file, pinned or not; returns whether it was here."""
        with self._lock:
            here = self._ledger.remove(name)
            if here:
                self.path(name).unlink(missing_ok=True)
        return here

    def _unlink(self, gone: tuple[str, ...]) -> None:
        self.evicted += len(gone)
        for name in gone:
            self.path(name).unlink(missing_ok=True)

    def _take_over(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{self._part}"):
            path.unlink(missing_ok=True)
        found = [(path, path.stat()) for path in folder.glob(f"*{self._suffix}")]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            for name in self._ledger.add(path.name.removesuffix(self._suffix), stat.st_size):
                self.path(name).unlink(missing_ok=True)
