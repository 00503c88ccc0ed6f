"""How popular names are: recency and frequency of their uses in one number. Pure."""

from __future__ import annotations

from typing import Final

HALF_LIFE: Final = 64.0
"""Uses of any name after which a use counts half: with a few, the latest use decides; with many, their number."""


class Popularity:
    """LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001): each use counts, and less the longer ago it is.

    The clock counts uses, of all names together: an idle night makes nothing less popular.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._uses = 0
        self._scores: dict[str, tuple[float, int]] = {}
        """By name: its score when it was used last, and when that was."""

    def use(self, name: str) -> None:
        """`name` is used now."""
        self._uses += 1
        self._scores[name] = (1 + self.score(name), self._uses)

    def score(self, name: str) -> float:
        """Sum over its uses of 2 ** (-uses since then / half-life); 0 for a name that was never used."""
        before, used = self._scores.get(name, (0.0, self._uses))
        return float(before * 2 ** ((used - self._uses) / self._half_life))
