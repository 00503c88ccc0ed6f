"""A tier of limited size: bytes, pins, what has to go when more comes, and links for loads. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop

# A bandwidth for loads that can wait, of which loads that cannot take their part first. Pure.


class LoadTokenBucket:
    """A token bucket that may be overdrawn: what demand takes is not there for planned loads. Times are in seconds.

    A limiter that only makes its callers wait cannot say this: demand never waits.

    Args:
        bytes_per_s: how fast it fills.
        burst_s: so many seconds' worth it holds at most, and owes at most.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = 1.0) -> None:
        self._bytes_per_s, self._most = bytes_per_s, bytes_per_s * burst_s
        self._left_bytes, self._at_s = self._most, 0.0

    def spend(self, size_bytes: int, now: float) -> None:
        """Bytes that were loaded, whether there was an allowance or not."""
        self._fill(now)
        self._left_bytes = max(-self._most, self._left_bytes - size_bytes)

    def wait_s(self, now: float) -> float:
        """Time until a planned load may go on; 0 where it may now."""
        self._fill(now)
        return max(0.0, -self._left_bytes / self._bytes_per_s)

    def _fill(self, now: float) -> None:
        self._left_bytes += max(0.0, now - self._at_s) * self._bytes_per_s
        self._left_bytes = min(self._most, self._left_bytes)
        self._at_s = max(self._at_s, now)


# A link over which loads come one after the other. Pure.


class FifoLink:
    """First come, first served: a load takes a latency and its bytes over the bandwidth. Times are in seconds.

    Args:
        bytes_per_s: bandwidth.
        latency_s: what every load takes beside it.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s = 0.0
        """When the last load that was begun ends."""

    def takes_s(self, size_bytes: float) -> float:
        """Time of one load on an idle link."""
        return self._latency_s + size_bytes / self._bytes_per_s

    def wait_s(self, now: float) -> float:
        """Time until a new load would begin."""
        return max(0.0, self._free_s - now)

    def load(self, size_bytes: float, now: float) -> float:
        """Queue a load that may begin `now`; when it ends."""
        self._free_s = max(now, self._free_s) + self.takes_s(size_bytes)
        return self._free_s


# What a tier of limited size holds: bytes, pins, and what has to go when more comes. Pure.


class EvictionLedger:
    """Names and their sizes, in the order of last use.

    Unpinned names may fill `budget_bytes`; pinned ones may exceed it, since they cannot go.

    Args:
        budget_bytes: see above.
        worth: the least worth goes first, of equals the least recently used; by default all are equal.
    """

    def __init__(self, budget_bytes: int, worth: Callable[[str], float] = lambda _: 0.0) -> None:
        self.budget_bytes = budget_bytes
        self._worth = worth
        self._sizes: dict[str, int] = {}
        """Sizes in order of use, the oldest first."""
        self._total_bytes = 0
        self._pins: Counter[str] = Counter()
        self._pinned_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all names."""
        return self._total_bytes

    @property
    def room_bytes(self) -> int:
        """Most bytes that could be added without a pinned name going; negative where pins exceed the budget."""
        return self.budget_bytes - self._pinned_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size_of(self, name: str) -> int | None:
        """Bytes of a name; None where it is not here."""
        return self._sizes.get(name)

    def is_pinned(self, name: str) -> bool:
        """Return whether it stays, once it is here."""
        return self._pins[name] > 0

    def add(self, name: str, size_bytes: int) -> tuple[str, ...]:
        """Enter `name` as the last used; returns the names that have to go for it, the first to go first.

        It is `name` alone where that is larger than the whole budget and not pinned.
        """
        self.remove(name)
        if size_bytes > self.budget_bytes and not self._pins[name]:
            return (name,)
        self._sizes[name] = size_bytes
        self._total_bytes += size_bytes
        self._pinned_bytes += size_bytes if self._pins[name] else 0
        return self._evicted(keep=name)

    def use(self, name: str) -> bool:
        """A user needs `name` now; whether it is here, the last used then."""
        if name not in self._sizes:
            return False
        self._sizes[name] = self._sizes.pop(name)
        return True

    def pin(self, name: str) -> None:
        """`name` stays until it is unpinned as often."""
        if not self._pins[name]:
            self._pinned_bytes += self._sizes.get(name, 0)
        self._pins[name] += 1

    def unpin(self, name: str) -> tuple[str, ...]:
        """Take one pin back; returns the names that have to go now.

        Raises:
            ValueError: there is no pin.
        """
        if self._pins[name] < 1:
            raise ValueError(f"{name} is not pinned")
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._pinned_bytes -= self._sizes.get(name, 0)
        return self._evicted(keep=None)

    def remove(self, name: str) -> bool:
        """Forget `name`, pinned or not; whether it was here."""
        size_bytes = self._sizes.pop(name, None)
        self._total_bytes -= size_bytes or 0
        self._pinned_bytes -= (size_bytes or 0) if self._pins[name] else 0
        return size_bytes is not None

    def _evicted(self, keep: str | None) -> tuple[str, ...]:
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
            self.remove(name)
        return tuple(gone)
