"""When a router may take the lease, by what it has seen of it and by its own clock alone."""

from __future__ import annotations

from typing import Final, NamedTuple

MARGIN: Final = 1.1
"""A router waits this much longer than the lease's life: clocks of two machines run at slightly different rates."""


class LeaseEntry(NamedTuple):
    """The lease's entry, as it was read."""

    revision: int
    """0 where there is no entry."""
    free: bool
    """It was given up, or never held: no router acts on it."""


class LeaseWatch:
    """How long one router has seen the lease unchanged. `life_s` is how long its holder acts after a renewal.

    The holder counts its time from before it asks for a renewal, and this router from after it has read the outcome. So
    the lease has ended for its holder when it may be taken here. An entry that is gone without having been given up
    counts as a change: it may have been renewed just before.
    """

    def __init__(self, life_s: float) -> None:
        self._unchanged_s = life_s * MARGIN
        self._seen: tuple[int, float] | None = None

    def see(self, sighting: LeaseEntry, now: float) -> float:
        """Seconds until the lease may be taken if it does not change again; 0 for now."""
        if sighting.free:
            return 0.0
        if self._seen is None or self._seen[0] != sighting.revision:
            self._seen = sighting.revision, now
        return max(0.0, self._seen[1] + self._unchanged_s - now)
