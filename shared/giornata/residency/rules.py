"""Which name a tier lets go of first: the least recently used, or the one that is worth least. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from giornata.residency.halving import HalvedCounts
from giornata.residency.uses import HALF_LIFE_S, REMEMBERED


class Rule(Protocol):
    """Says what each name of one tier is worth. Times are seconds on one clock, which the caller reads."""

    def used(self, name: str, now: float) -> None:
        """A user needs `name` now, whether the tier has it or not."""

    def entered(self, name: str, size_bytes: int, reload_ms: float, now: float) -> None:
        """The tier has `name` from now on; another load of it would take `reload_ms`."""

    def evicted(self, name: str) -> None:
        """`name` was worth least and had to go."""

    def worth(self, name: str) -> float:
        """The least goes first; of equals the least recently used."""


class Lru:
    """All are worth the same, so that the least recently used goes first."""

    def used(self, name: str, now: float) -> None:
        """See :class:`Rule`."""

    def entered(self, name: str, size_bytes: int, reload_ms: float, now: float) -> None:
        """See :class:`Rule`."""

    def evicted(self, name: str) -> None:
        """See :class:`Rule`."""

    def worth(self, name: str) -> float:  # noqa: ARG002 - all alike
        """See :class:`Rule`."""
        return 0.0


class ByWorth:
    """Asks `worth`, which counts uses itself."""

    def __init__(self, worth: Callable[[str], float]) -> None:
        self.worth = worth

    def used(self, name: str, now: float) -> None:
        """See :class:`Rule`."""

    def entered(self, name: str, size_bytes: int, reload_ms: float, now: float) -> None:
        """See :class:`Rule`."""

    def evicted(self, name: str) -> None:
        """See :class:`Rule`."""


class Gdsf:
    """GreedyDual-Size with frequency (Cherkasova, HPL-98-69R1): a clock plus uses times reload time over bytes.

    The clock is the worth of the latest name that had to go. So what was popular once is overtaken by what is used
    now. A use counts half after `half_life_s`. Uses are counted of absent names too: one that comes back often is not
    taken for a new one, as long as :data:`giornata.residency.uses.REMEMBERED` others have not come since.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._clock = 0.0
        self._uses = HalvedCounts(half_life_s, REMEMBERED)
        self._costs: dict[str, float] = {}
        """Reload time per byte of names that the tier has, in milliseconds."""
        self._worth: dict[str, float] = {}

    def used(self, name: str, now: float) -> None:
        """See :class:`Rule`."""
        self._uses.add(name, now)
        self._weigh(name, now)

    def entered(self, name: str, size_bytes: int, reload_ms: float, now: float) -> None:
        """See :class:`Rule`."""
        self._costs[name] = reload_ms / max(1, size_bytes)
        self._weigh(name, now)

    def evicted(self, name: str) -> None:
        """See :class:`Rule`."""
        self._clock = max(self._clock, self._worth.pop(name, 0.0))
        self._costs.pop(name, None)

    def worth(self, name: str) -> float:
        """See :class:`Rule`."""
        return self._worth.get(name, 0.0)

    def _weigh(self, name: str, now: float) -> None:
        if name in self._costs:
            self._worth[name] = self._clock + max(1.0, self._uses.at(name, now)) * self._costs[name]


class RuleName(StrEnum):
    """What a rule is called in configurations and simulations."""

    LRU = "lru"
    """Least recently used first."""
    GDSF = "gdsf"
    """Least first by uses of late, times reload time, over bytes."""


def rule_of(name: RuleName) -> Rule:
    """A new rule, for one tier."""
    return Gdsf() if name is RuleName.GDSF else Lru()
