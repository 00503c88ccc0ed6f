"""How many pictures may be in progress at this gateway, and how many event streams open. Pure: durations are given.

An edit holds as many places as it has pictures from the moment its request is read to the moment its job has ended; an
asynchronous job only until it is accepted, since from there on the router's queue limit counts it. A request that is
still being received holds none, so that a slow client keeps nobody out; its bytes are counted elsewhere.
"""

from __future__ import annotations

import math

from giornata.wire.errors import ServiceUnavailable, TooManyRequests

SMOOTHING = 0.2
"""Weight of the latest edit in the running mean of how long a picture takes."""


class Admission:
    """Counts places against a limit; one request, however large, always fits into an idle gateway."""

    def __init__(self, limit: int, what: str = "pictures") -> None:
        self.limit = limit
        self.what = what
        self.taken = 0
        """Places taken now."""
        self.closed = False
        """Draining: nothing more is admitted."""
        self._seconds_each = 1.0

    def check(self, places: int = 1) -> None:
        """Whether :meth:`enter` would succeed now; raises the same."""
        if self.closed:
            raise ServiceUnavailable("This gateway is shutting down.", retry_after_s=1)
        if self.taken and self.taken + places > self.limit:
            raise TooManyRequests(
                received=f"{places} {self.what} while {self.taken} are in progress",
                accepted=f"{self.limit} {self.what} at a time",
                retry_after_s=self.retry_after_s(self.taken + places - self.limit),
            )

    def enter(self, places: int) -> None:
        """Take places.

        Raises:
            TooManyRequests: no room; says when there may be.
            ServiceUnavailable: the gateway is shutting down.
        """
        self.check(places)
        self.taken += places

    def leave(self, places: int, seconds: float | None = None) -> None:
        """Give places back; `seconds` is how long an edit that was carried out took."""
        self.taken -= places
        if seconds is not None and places:
            self._seconds_each += SMOOTHING * (seconds / places - self._seconds_each)

    def retry_after_s(self, excess: int) -> float:
        """Whole seconds until `excess` places should be free, judged by the latest edits."""
        return self.estimate_s(excess, self.limit)

    def estimate_s(self, pictures: int, at_a_time: int) -> float:
        """Whole seconds until `pictures` should be done, of those that are worked on `at_a_time`; at least 1."""
        return float(max(1, math.ceil(self._seconds_each * pictures / at_a_time)))
