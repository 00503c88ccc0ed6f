"""Popularity: what is used how often, and where its homes are. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import combinations
from typing import Final

# Counts that halve as time goes by. Pure.


class HalvedCounts:
    """Times may be seconds or anything else that never goes back.

    Args:
        half_life: after which a count is half of what it was.
        remembered: most names that are known, those that were counted last; None: all.
    """

    def __init__(self, half_life: float, remembered: int | None = None) -> None:
        self._half_life, self._remembered = half_life, remembered
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What a name counted when it was counted last, and when that was; the latest last."""

    def __iter__(self) -> Iterator[str]:
        """Names, the one that was counted last at the end."""
        return iter(self._counted)

    def add(self, name: str, now: float) -> None:
        """Count `name` once more."""
        self._counted[name] = 1.0 + self.at(name, now), now
        self._counted.move_to_end(name)
        if self._remembered is not None and len(self._counted) > self._remembered:
            self._counted.popitem(last=False)

    def at(self, name: str, now: float) -> float:
        """Return what `name` counts; 0 where it is not known."""
        counted, at = self._counted.get(name, (0.0, now))
        return float(counted * 0.5 ** ((now - at) / self._half_life))

    def copy(self) -> HalvedCounts:
        """The same counts, which then go their own way."""
        made = HalvedCounts(self._half_life, self._remembered)
        made._counted = self._counted.copy()
        return made


# How popular names are: recency and frequency of their uses in one number. Pure.


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


# Which adapters jobs have asked for of late, how often, and which ones together. Pure.


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


# Homes of templates and adapters: places in an order that every process finds by itself. Pure.
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
