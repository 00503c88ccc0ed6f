"""A tier of limited size whose values come from the tier below: each is loaded once, and stays while it is pinned.

Recordings, adapters and ControlNets use the same. Synchronous, and safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from giornata.residency.tiers import EvictionLedger

V = TypeVar("V")


class TierLookup(NamedTuple, Generic[V]):
    """A tier's answer about a name."""

    value: V | None
    """None where the tier below has it not either."""
    loaded: bool
    """Whether this call loaded it; otherwise it was here, or another call did."""


class LoadedTier(Generic[V]):
    """Values by name within a budget, by default least recently used out first.

    Args:
        budget_bytes: most bytes of values that are not pinned.
        size_of: bytes of a value.
        worth: see :class:`giornata.residency.tiers.EvictionLedger`; asked under the lock.
    """

    def __init__(
        self,
        budget_bytes: int,
        size_of: Callable[[V], int],
        worth: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self.lock = threading.RLock()
        """Held while names are changed, never while a value is loaded."""
        self.evicted = 0
        """Values that had to go since the start."""
        self._ledger = EvictionLedger(budget_bytes, worth)
        self._size_of = size_of
        self._values: dict[str, V] = {}
        self._loading: dict[str, Future[V | None]] = {}

    def __contains__(self, name: object) -> bool:
        with self.lock:
            return name in self._values

    def __iter__(self) -> Iterator[str]:
        """Names in the order of last use, the oldest first."""
        with self.lock:
            return iter(tuple(self._ledger))

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        with self.lock:
            return self._ledger.size_bytes

    @property
    def room_bytes(self) -> int:
        """Most bytes that could come without a pinned value going."""
        with self.lock:
            return self._ledger.room_bytes

    def size_of(self, name: str) -> int | None:
        """Bytes of the value of this name; None where it is not here."""
        with self.lock:
            return self._ledger.size_of(name)

    def get(self, name: str) -> V | None:
        """The value, used now; None where it is not here. Does not wait."""
        with self.lock:
            self._ledger.use(name)
            return self._values.get(name)

    def peek(self, name: str) -> V | None:
        """The value, without a use; None where it is not here. Does not wait."""
        with self.lock:
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
            self._drop(self._ledger.add(name, self._size_of(value)))

    def remove(self, name: str) -> bool:
        """Forget a value, pinned or not; whether it was here."""
        with self.lock:
            self._values.pop(name, None)
            return self._ledger.remove(name)

    @contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """Keep a value within the context, from when it is there."""
        with self.lock:
            self._ledger.pin(name)
        try:
            yield
        finally:
            with self.lock:
                self._drop(self._ledger.unpin(name))

    def _drop(self, gone: tuple[str, ...]) -> None:
        self.evicted += len(gone)
        for name in gone:
            self._values.pop(name, None)
