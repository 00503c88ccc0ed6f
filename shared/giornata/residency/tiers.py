"""Tiers of limited size for templates, LoRAs and ControlNets: what is resident, and what goes when more comes.

Synchronous, and safe to use from several threads.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from giornata.residency.ledger import EvictionLedger

V = TypeVar("V")

BURST_S: Final = 1.0
"""What a bucket holds at most, in seconds of its allowance."""
PART: Final = ".part"
"""Ends the names of files that are being written."""


class LoadTokenBucket:
    """A token bucket that may be overdrawn: what demand takes is not there for planned loads. Times are in seconds.

    A limiter that only makes its callers wait cannot say this: demand never waits. As much as it holds at most, it
    owes at most.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._even_s = -BURST_S
        """When nothing is owed."""

    def spend(self, size_bytes: int, now: float) -> None:
        """Bytes that were loaded, whether there was an allowance or not."""
        even_s = max(self._even_s, now - BURST_S) + size_bytes / self._bytes_per_s
        self._even_s = min(even_s, now + BURST_S)

    def wait_s(self, now: float) -> float:
        """Time until a planned load may go on; 0 where it may now."""
        return max(0.0, self._even_s - now)


class TierLookup(NamedTuple, Generic[V]):
    """A tier's answer about a name."""

    value: V | None
    """None where the tier below has it not either."""
    loaded: bool
    """Whether this call loaded it; otherwise it was here, or another call did."""


class LoadedTier(EvictionLedger, Generic[V]):
    """Values that come from the tier below: each is loaded once, and stays while it is pinned."""

    def __init__(self, budget_bytes: int, bytes_of: Callable[[V], int]) -> None:
        super().__init__(budget_bytes, lock=threading.RLock())
        self._bytes_of = bytes_of
        self._values: dict[str, V] = {}
        self._loading: dict[str, Future[V | None]] = {}

    def get(self, name: str) -> V | None:
        """The value, used now; None where it is not here. Does not wait."""
        with self.lock:
            self.use(name)
            return self._values.get(name)

    def peek(self, name: str) -> V | None:
        """The value, without a use; None where it is not here. Does not wait."""
        return self._values.get(name)

    def load(
        self,
        name: str,
        read: Callable[[], V | None],
        stays: Callable[[], bool] = lambda: True,
        *,
        ahead: bool = False,
    ) -> TierLookup[V]:
        """The value from here, else what `read` makes of the tier below. One thread reads; others wait for it.

        It is kept if it `stays`, which is asked under the lock: a removal meanwhile holds. What `read` raises is
        raised in all threads that wait. A load `ahead` of its use does not count as a use.
        """
        with self.lock:
            if (found := self._values.get(name) if ahead else self.get(name)) is not None:
                return TierLookup(found, loaded=False)
            others = self._loading.get(name)
            if others is None:
                mine = self._loading[name] = Future()
        if others is not None:
            return TierLookup(others.result(), loaded=False)
        try:
            found = read()
        except BaseException as error:
            self._loading.pop(name)
            mine.set_exception(error)
            raise
        with self.lock:
            del self._loading[name]
            if found is not None and stays():
                self.keep(name, found)
        mine.set_result(found)
        return TierLookup(found, loaded=True)

    def keep(self, name: str, value: V) -> None:
        """Enter a value as the last used; it is let go of at once where it alone exceeds the budget, unpinned."""
        with self.lock:
            self._values[name] = value
            self.add(name, self._bytes_of(value))

    def _release(self, name: str) -> None:
        self._values.pop(name, None)


class FolderTier(EvictionLedger):
    """Files of a folder by name. They are replaced and unlinked, never written in place.

    Files that an earlier process left are taken over, the oldest use first; what it left half written is removed.

    Args:
        folder: made if need be; None for a tier that holds nothing.
        budget_bytes: most bytes of files that are not pinned.
        suffix: ends the names of the tier's files, each of which is called by what is before.
        worth: see :class:`EvictionLedger`.
    """

    def __init__(
        self,
        folder: Path | None,
        budget_bytes: int,
        suffix: str,
        worth: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(budget_bytes, worth, threading.RLock())
        self.folder: Final = folder
        self._suffix, self._part = suffix, suffix.removesuffix(".safetensors") + PART
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{self._part}"):
            path.unlink(missing_ok=True)
        found = [(path, path.stat()) for path in folder.glob(f"*{suffix}")]
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
            self.add(path.name.removesuffix(suffix), stat.st_size)
        self.evicted = 0

    def path(self, name: str) -> Path:
        """Return where the file of a name lies, or would."""
        if self.folder is None:
            raise ValueError("there is no disk tier")
        return self.folder / f"{name}{self._suffix}"

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path for the file of `name`, which appears whole when the context ends, and used last; or not at all."""
        handle, part_name = tempfile.mkstemp(dir=self.folder, suffix=self._part)
        os.close(handle)
        part = Path(part_name)
        try:
            yield part
            with self.lock:
                size_bytes = part.stat().st_size
                part.replace(self.path(name))
                self.add(name, size_bytes)
        finally:
            part.unlink(missing_ok=True)

    def _release(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)
