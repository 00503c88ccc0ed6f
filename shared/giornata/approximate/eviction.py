"""Which kept latent is worth least: the least computationally beneficial and frequently used (Nirvana, 5.2). Pure."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

N = TypeVar("N", bound=Hashable)
STALE: Final = 2
"""The heap is made anew once it is so many times longer than there are names."""


class Lcbfu(Generic[N]):
    """Names by (1 + uses) times the steps that each use saves; of equals the oldest goes first.

    A name that was never used counts as used once: otherwise a new one would be as worthless after one step as after
    many.
    """

    def __init__(self) -> None:
        self._saves: dict[N, tuple[int, int, int]] = {}
        """Uses, steps saved, and age."""
        self._heap: list[tuple[int, int, N]] = []
        """Worth and age; what has been used since, or has gone, is stale."""
        self._ages = count()

    def __len__(self) -> int:
        return len(self._saves)

    def __contains__(self, name: object) -> bool:
        return name in self._saves

    def add(self, name: N, steps: int) -> None:
        """A new name, which saves so many steps each time that it is used."""
        self._put(name, 0, steps, next(self._ages))

    def use(self, name: N) -> None:
        """It is used once more."""
        uses, steps, age = self._saves[name]
        self._put(name, uses + 1, steps, age)

    def uses(self, name: N) -> int:
        """How often it was used."""
        return self._saves[name][0]

    def remove(self, name: N) -> None:
        """Forget a name, if it is there."""
        self._saves.pop(name, None)

    def least(self) -> N | None:
        """The name that is worth least; None where there is none."""
        while self._heap:
            worth, age, name = self._heap[0]
            known = self._saves.get(name)
            if known is not None and (_worth(known), known[2]) == (worth, age):
                return name
            heappop(self._heap)
        return None

    def _put(self, name: N, uses: int, steps: int, age: int) -> None:
        self._saves[name] = uses, steps, age
        heappush(self._heap, (_worth(self._saves[name]), age, name))
        if len(self._heap) > STALE * len(self._saves) + 64:
            self._heap = [(_worth(known), known[2], each) for each, known in self._saves.items()]
            heapify(self._heap)


def _worth(known: tuple[int, int, int]) -> int:
    uses, steps, _ = known
    return (1 + uses) * steps
