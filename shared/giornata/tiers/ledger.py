"""What stays in a tier of limited size: the least recently used, or least popular, goes first; what is pinned never.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator


class TierLedger:
    """Names and their sizes, in the order of last use.

    Unpinned names may fill `budget_bytes`; pinned ones may exceed it, since they cannot go.

    Args:
        budget_bytes: see above.
        worth: the name that is worth least goes first, of equals the least recently used; default: all are equal.
    """

    def __init__(self, budget_bytes: int, worth: Callable[[str], float] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._worth = worth
        self._sizes: dict[str, int] = {}
        """Sizes in order of use, the oldest first."""
        self._total_bytes = 0
        self._pins: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        """Bytes of all names."""
        return self._total_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def size_of(self, name: str) -> int | None:
        """Bytes of a name; None where it is not here."""
        return self._sizes.get(name)

    def add(self, name: str, size_bytes: int) -> tuple[str, ...]:
        """Enter `name` as the last used; returns the names that have to go for it, the first to go first.

        It is `name` alone where that is larger than the whole budget and not pinned.
        """
        self.remove(name)
        if size_bytes > self.budget_bytes and not self._pins[name]:
            return (name,)
        self._sizes[name] = size_bytes
        self._total_bytes += size_bytes
        return self._evicted(keep=name)

    def use(self, name: str) -> None:
        """Note that `name`, which is here, is used now."""
        self._sizes[name] = self._sizes.pop(name)

    def pin(self, name: str) -> None:
        """`name` stays until it is unpinned as often."""
        self._pins[name] += 1

    def unpin(self, name: str) -> tuple[str, ...]:
        """Take one pin back; returns the names that have to go now.

        Raises:
            ValueError: there is no pin.
        """
        if self._pins[name] < 1:
            raise ValueError(f"{name} is not pinned")
        self._pins[name] -= 1
        self._pins += Counter()  # drops zeros
        return self._evicted(keep=None)

    def remove(self, name: str) -> bool:
        """Forget `name`, pinned or not; whether it was here."""
        size_bytes = self._sizes.pop(name, None)
        self._total_bytes -= size_bytes or 0
        return size_bytes is not None

    def _evicted(self, keep: str | None) -> tuple[str, ...]:
        gone, excess = list[str](), self._total_bytes - self.budget_bytes
        if excess <= 0:
            return ()
        names = self._sizes if self._worth is None else sorted(self._sizes, key=self._worth)
        for name in names:
            size = self._sizes[name]
            if excess <= 0:
                break
            if name != keep and not self._pins[name]:
                gone.append(name)
                excess -= size
        for name in gone:
            self.remove(name)
        return tuple(gone)
