"""The disk tier: recordings as files of one folder, least recently used out first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import structlog

from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.blocks.ledger import TierLedger
from giornata_denoiser.rows.template import Recording
from giornata_denoiser.templates import files

log = structlog.get_logger(__name__)


class Disk:
    """Files of recordings, by the recording's id.

    A file is checked when it is first opened, and again only when another file has its name: a return from disk costs
    what is read of the file and no more.

    Args:
        folder: its files are taken over, oldest use first; None for a tier that holds nothing.
        budget_bytes: most bytes of all files.
        lock: held while the ledger changes, never while a file is read or written. The caller of `__contains__`,
            `__iter__`, `size_of`, `size_bytes`, `use` and `forget` holds it.
        pin: keep what is read in pinned memory, not mapped: a CUDA device reads it asynchronously.
        told: told how long each read took, in the reading thread.
    """

    def __init__(
        self,
        folder: Path | None,
        budget_bytes: int,
        lock: AbstractContextManager[object],
        *,
        pin: bool,
        told: Callable[[LoadSample], object],
    ) -> None:
        self._folder, self._ledger, self._lock = folder, TierLedger(budget_bytes), lock
        self._pin, self._told = pin, told
        self._checked: dict[str, files.Stamp] = {}
        """The file of each recording that was found to be whole."""
        if folder is not None:
            self._take_over(folder)

    def __contains__(self, recording_id: object) -> bool:
        return recording_id in self._ledger

    def __iter__(self) -> Iterator[str]:
        return iter(self._ledger)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return self._ledger.size_bytes

    def size_of(self, recording_id: str) -> int | None:
        """Bytes of a file; None where there is none."""
        return self._ledger.size_of(recording_id)

    def use(self, recording_id: str) -> None:
        """A recording that is here is used now."""
        self._ledger.use(recording_id)

    def put(self, recording: Recording) -> int:
        """Write `recording`; returns how many others had to go for it.

        Raises:
            OSError: it cannot be written.
        """
        if self._folder is None:
            return 0
        size = files.write(recording, self._path(recording.id))
        with self._lock:
            gone = self._ledger.add(recording.id, size)
        for name in gone:
            self.unlink(name)
        return len(gone)

    def forget(self, recording_id: str) -> bool:
        """Take a recording out of the ledger; whether it was there. Its file stays until :meth:`unlink`."""
        self._checked.pop(recording_id, None)
        return self._ledger.remove(recording_id)

    def unlink(self, recording_id: str) -> None:
        """Remove the file of a recording, if there is one."""
        self._path(recording_id).unlink(missing_ok=True)

    def read_ahead(self, recording_id: str) -> None:
        """Ask the system to read a file before it is needed."""
        files.read_ahead(self._path(recording_id))

    def read(self, recording_id: str) -> Recording | None:
        """The recording in a file; None where the file cannot be read, or holds none and is removed."""
        try:
            return self._opened(self._path(recording_id), recording_id)
        except (files.NotARecording, OSError) as error:
            log.warning("template_dropped", template=recording_id, error=str(error))
            with self._lock:
                self.forget(recording_id)
            self.unlink(recording_id)
        except Exception:  # the edge of edits, such as no memory to pin: not the file's fault
            log.exception("template_not_read", template=recording_id)
        return None

    def _opened(self, path: Path, recording_id: str) -> Recording:
        began_s = time.perf_counter()
        stamp = files.stamp(path)
        recording = files.read(path, recording_id, checked=self._checked.get(recording_id) == stamp)
        self._checked[recording_id] = stamp
        if self._pin:
            recording = recording.pinned()
        load_ms = (time.perf_counter() - began_s) * 1e3
        self._told(LoadSample(tier=Tier.DISK, size_bytes=recording.size_bytes, load_ms=load_ms))
        return recording

    def _path(self, recording_id: str) -> Path:
        if self._folder is None:
            raise ValueError("there is no disk tier")
        return self._folder / f"{recording_id}{files.SUFFIX}"

    def _take_over(self, folder: Path) -> None:
        """Enter what an earlier process left, and clear what it left half written."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{files.PART}"):
            path.unlink(missing_ok=True)
        found = [(path, path.stat()) for path in folder.glob(f"*{files.SUFFIX}")]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            for name in self._ledger.add(path.name.removesuffix(files.SUFFIX), stat.st_size):
                self.unlink(name)
