"""The books of a tier of limited size: bytes, pins, and what has to go when more comes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from heapq import heapify, heappop
from typing import Final

UNLOCKED: Final = nullcontext()


class EvictionLedger:
    """Names and their sizes, in the order of last use.

    Unpinned names may fill `budget_bytes`; pinned ones may exceed it, since they cannot go.

    The least `worth`, asked under the lock, goes first, of equals the least recently used; by default all are equal.
    For several threads, the `lock` is one that a thread may take again.
    """

    def __init__(
        self,
        budget_bytes: int,
        worth: Callable[[str], float] = lambda _: 0.0,
        lock: AbstractContextManager[object] = UNLOCKED,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.lock = lock
        """Held while names are changed, never while a value is loaded or a file is written."""
        self.evicted = 0
        """Names that had to go since the start."""
        self._worth = worth
        self._sizes: dict[str, int] = {}
        """Sizes in order of use, the oldest first."""
        self._total_bytes = self._pinned_bytes = 0
        self._pins: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        """Bytes of all names."""
        return self._total_bytes

    @property
    def room_bytes(self) -> int:
        """Most bytes that could be added without a pinned name going; negative where pins exceed the budget."""
        return self.budget_bytes - self._pinned_bytes

    @property
    def pins(self) -> frozenset[str]:
        """Names that stay, those that are not here yet among them."""
        return frozenset(self._pins)

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        """Names in the order of last use, the oldest first."""
        with self.lock:
            return iter(tuple(self._sizes))

    def size_of(self, name: str) -> int | None:
        """Bytes of a name; None where it is not here."""
        return self._sizes.get(name)

    def add(self, name: str, size_bytes: int) -> tuple[str, ...]:
        """Enter `name` as the last used; returns the names that have to go for it, the first to go first.

        It is `name` alone where that is larger than the whole budget and not pinned.
        """
        with self.lock:
            self._forget(name)
            if size_bytes > self.budget_bytes and not self._pins[name]:
                return self._let_go((name,))
            self._sizes[name] = size_bytes
            self._total_bytes += size_bytes
            self._pinned_bytes += size_bytes if self._pins[name] else 0
            return self._evict(keep=name)

    def use(self, name: str) -> bool:
        """Use `name` now; returns whether it is here, the last used then."""
        with self.lock:
            if name not in self._sizes:
                return False
            self._sizes[name] = self._sizes.pop(name)
            return True

    def pin(self, name: str) -> None:
        """Keep `name`, from when it is there, until it is unpinned as often."""
        with self.lock:
            if not self._pins[name]:
                self._pinned_bytes += self._sizes.get(name, 0)
            self._pins[name] += 1

    def unpin(self, name: str) -> tuple[str, ...]:
        """Take one pin back; returns the names that have to go now.

        Raises:
            ValueError: there is no pin.
        """
        with self.lock:
            if self._pins[name] < 1:
                raise ValueError(f"{name} is not pinned")
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]
                self._pinned_bytes -= self._sizes.get(name, 0)
            return self._evict(keep=None)

    @contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """Keep `name` within the context, from when it is there."""
        self.pin(name)
        try:
            yield
        finally:
            self.unpin(name)

    def remove(self, name: str) -> bool:
        """Forget `name`, pinned or not; whether it was here."""
        with self.lock:
            here = self._forget(name)
            if here:
                self._release(name)
            return here

    def _release(self, name: str) -> None:
        """Let go of what a tier holds by a name that has gone; under the lock."""

    def _forget(self, name: str) -> bool:
        size_bytes = self._sizes.pop(name, None)
        self._total_bytes -= size_bytes or 0
        self._pinned_bytes -= (size_bytes or 0) if self._pins[name] else 0
        return size_bytes is not None

    def _evict(self, keep: str | None) -> tuple[str, ...]:
        gone, excess = list[str](), self._total_bytes - self.budget_bytes
        if excess <= 0:
            return ()
        order = [(self._worth(name), place, name) for place, name in enumerate(self._sizes)]
        heapify(order)
        while order and excess > 0:
            _, _, name = heappop(order)
            if name != keep and not self._pins[name]:
                gone.append(name)
                excess -= self._sizes[name]
        for name in gone:
            self._forget(name)
        return self._let_go(tuple(gone))

    def _let_go(self, gone: tuple[str, ...]) -> tuple[str, ...]:
        self.evicted += len(gone)
        for name in gone:
            self._release(name)
        return gone
