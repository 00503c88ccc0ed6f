"""Which adapters jobs have asked for of late, how often, and which ones together. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import combinations
from typing import Final

from giornata.residency.halving import HalvedCounts

HALF_LIFE_S: Final = 1800.0
"""Time after which a use counts half."""
REMEMBERED: Final = 1 << 16
"""Adapters of which uses are known."""


class AdapterUsage:
    """Feed it every job's adapters once. Times are seconds on one clock and never go back.

    Args:
        half_life_s: see :meth:`lately`.
        window_s: how far :meth:`counts` and :meth:`together` look back at most.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, window_s: float = 600.0) -> None:
        self._half_life_s, self._window_s = half_life_s, window_s
        self._lately = HalvedCounts(half_life_s, REMEMBERED)
        self._window: deque[tuple[float, frozenset[str]]] = deque()

    def see(self, adapters: Iterable[str], now: float) -> None:
        """A job asks for these, by digest."""
        asked = frozenset(adapters)
        if not asked:
            return
        for digest in sorted(asked):
            self._lately.add(digest, now)
        self._window.append((now, asked))
        while self._window[0][0] < now - self._window_s:
            self._window.popleft()

    def copy(self) -> AdapterUsage:
        """The uses as they are now, for another thread."""
        made = AdapterUsage(self._half_life_s, self._window_s)
        made._lately, made._window = self._lately.copy(), self._window.copy()
        return made

    def lately(self, digest: str, now: float) -> float:
        """Uses of an adapter; each counts half after the half-life."""
        return self._lately.at(digest, now)

    def known(self) -> tuple[str, ...]:
        """Adapters that were asked for, the latest last."""
        return tuple(self._lately)

    def counts(self, window_s: float, now: float) -> Counter[str]:
        """Uses by adapter in the latest `window_s`."""
        return Counter(digest for at_s, asked in self._window if at_s >= now - window_s for digest in asked)

    def together(self, window_s: float, now: float) -> Counter[tuple[str, str]]:
        """Jobs in the latest `window_s` by each pair of adapters that they asked for, in the order of their digests."""
        asked = (asked for at_s, asked in self._window if at_s >= now - window_s and len(asked) > 1)
        return Counter(pair for digests in asked for pair in combinations(sorted(digests), 2))
