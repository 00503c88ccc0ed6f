"""Which kept latents go when their bytes exceed the budget: least computation beneficial and frequently used (LCBFU).

Nirvana, NSDI '24, §5.4: the latent goes whose uses times steps saved are the least; of equals, the one that was not
used for longest. A latent that was just added counts as used once: that of a later step is worth more from the start.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass
class _Held:
    size_bytes: int
    steps: int
    uses: int
    turn: int
    """Number of its last use among all uses."""


class Lcbfu(Generic[K]):
    """Sizes, uses and steps saved of what is kept, within `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held: dict[K, _Held] = {}
        self._order: list[tuple[int, int, K]] = []
        """A heap by worth and turn; what is not so any more is passed over."""
        self._turns = itertools.count()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, kept: K) -> bool:
        return kept in self._held

    def add(self, kept: K, size_bytes: int, steps: int) -> None:
        """Count something that is kept now, and that saves so many steps a use."""
        self.remove(kept)
        self._held[kept] = _Held(size_bytes, steps, 0, 0)
        self.size_bytes += size_bytes
        self.use(kept)

    def use(self, kept: K) -> None:
        """It has saved its steps once more."""
        held = self._held[kept]
        held.uses, held.turn = held.uses + 1, next(self._turns)
        heapq.heappush(self._order, (held.uses * held.steps, held.turn, kept))
        if len(self._order) > 2 * len(self._held) + 64:  # mostly passed over: keep what holds
            self._order = [(each.uses * each.steps, each.turn, key) for key, each in self._held.items()]
            heapq.heapify(self._order)

    def remove(self, kept: K) -> None:
        """It is kept no more; nothing where it was not."""
        held = self._held.pop(kept, None)
        if held is not None:
            self.size_bytes -= held.size_bytes

    def evict(self) -> Iterator[K]:
        """Remove what exceeds the budget, the least worth first."""
        while self.size_bytes > self._budget_bytes and self._order:
            _, turn, kept = heapq.heappop(self._order)
            held = self._held.get(kept)
            if held is not None and held.turn == turn:
                self.remove(kept)
                yield kept
