"""How popular names are: recency and frequency of their uses in one number. Pure."""

from __future__ import annotations

from typing import Final

from giornata.residency.halving import HalvedCounts

HALF_LIFE: Final = 64.0
"""Uses of any name after which a use counts half: with a few, the latest use decides; with many, their number."""


class Popularity:
    """LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001): each use counts, and less the longer ago it is.

    The clock counts uses, of all names together: an idle night makes nothing less popular.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._uses = 0
        self._counts = HalvedCounts(half_life)

    def use(self, name: str) -> None:
        """`name` is used now."""
        self._uses += 1
        self._counts.add(name, self._uses)

    def score(self, name: str) -> float:
        """Sum over its uses of 2 ** (-uses since then / half-life); 0 for a name that was never used."""
        return self._counts.at(name, self._uses)
