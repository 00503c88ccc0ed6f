"""Popularity: which adapters jobs have asked for of late, and where the homes of templates and adapters are. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from hashlib import blake2b
from itertools import combinations
from typing import Final

HALF_LIFE_S: Final = 1800.0
"""Time after which a use counts half."""
REMEMBERED: Final = 1 << 16
"""Adapters of which uses are known, those that were asked for last."""


class AdapterUsage:
    """Feed it every job's adapters once. Times are seconds on one clock and never go back.

    Args:
        half_life_s: see :meth:`lately`.
        window_s: how far :meth:`counts` and :meth:`together` look back at most.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, window_s: float = 600.0) -> None:
        self._half_life_s, self._window_s = half_life_s, window_s
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What an adapter counted when it was asked for last, and when that was; the latest last."""
        self._window: deque[tuple[float, frozenset[str]]] = deque()

    def see(self, adapters: Iterable[str], now: float) -> None:
        """A job asks for these, by digest."""
        asked = frozenset(adapters)
        if not asked:
            return
        for digest in sorted(asked):
            self._counted[digest] = 1.0 + self.lately(digest, now), now
            self._counted.move_to_end(digest)
            if len(self._counted) > REMEMBERED:
                self._counted.popitem(last=False)
        self._window.append((now, asked))
        while self._window[0][0] < now - self._window_s:
            self._window.popleft()

    def copy(self) -> AdapterUsage:
        """The uses as they are now, for another thread."""
        made = AdapterUsage(self._half_life_s, self._window_s)
        made._counted, made._window = self._counted.copy(), self._window.copy()
        return made

    def lately(self, digest: str, now: float) -> float:
        """Uses of an adapter; each counts half after the half-life."""
        counted, at_s = self._counted.get(digest, (0.0, now))
        return float(counted * 0.5 ** ((now - at_s) / self._half_life_s))

    def known(self) -> tuple[str, ...]:
        """Adapters that were asked for, the latest last."""
        return tuple(self._counted)

    def counts(self, window_s: float, now: float) -> Counter[str]:
        """Uses by adapter in the latest `window_s`."""
        return Counter(digest for at_s, asked in self._window if at_s >= now - window_s for digest in asked)

    def together(self, window_s: float, now: float) -> Counter[tuple[str, str]]:
        """Jobs in the latest `window_s` by each pair of adapters that they asked for, in the order of their digests."""
        asked = (asked for at_s, asked in self._window if at_s >= now - window_s and len(asked) > 1)
        return Counter(pair for digests in asked for pair in combinations(sorted(digests), 2))


# Homes of templates and adapters: places in an order that every process finds by itself.
#
# Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): a
# place that comes or goes moves the homes of its own adapters alone.


def rendezvous_weight(*parts: str) -> int:
    """A number of 64 bits that looks drawn, and is the same in every process."""
    digest = blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def home_of(places: Iterable[str], name: str) -> str | None:
    """The place with the highest number for `name`; None where there is no place."""
    return max(places, key=lambda place: rendezvous_weight(name, place), default=None)


def rank_homes(name: str, places: Iterable[str]) -> list[str]:
    """The places of `name`, its home first."""
    return sorted(places, key=lambda place: (-rendezvous_weight(name, place), place))
