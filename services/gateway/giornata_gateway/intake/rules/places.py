"""How many pictures may be in progress at this gateway, and how many event streams may be open.

An edit holds as many places as it has pictures, from the moment its request is read until its job has ended; an
asynchronous job only until it is accepted, since from there on the router's queue limit counts it. A request that is
still being received holds none, so that a slow client keeps no other client out; its bytes are counted elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from giornata.wire.errors import ServiceUnavailable, TooManyRequests

SMOOTHING: Final = 0.2
"""Weight of the latest edit in the running mean of how long a picture takes."""


@dataclass
class Stay:
    """What becomes of a request while it holds its places."""

    seconds: float | None = None
    """How long the edit took, once it was carried out; None leaves the running mean as it is."""
    lasting: bool = False
    """The tenant's pictures count as in progress until the job's end is heard, not only while the places are held."""
    repeated: bool = False
    """The job was accepted for an earlier request with the same idempotency key."""


class Places:
    """Counts places against a limit. One request of any size fits into an idle gateway."""

    def __init__(self, limit: int, what: str = "pictures") -> None:
        self.limit = limit
        self.what = what
        self.taken = 0
        """Places taken now."""
        self.closed = False
        """Draining: nothing more is admitted."""
        self._seconds_each = 1.0

    def check(self, places: int = 1) -> None:
        """Raise where there is no room for so many places.

        Raises:
            TooManyRequests: no room; says when there may be.
            ServiceUnavailable: the gateway is shutting down.
        """
        if self.closed:
            raise ServiceUnavailable("This gateway is shutting down.", retry_after_s=1)
        if self.taken and self.taken + places > self.limit:
            raise TooManyRequests(
                received=f"{places} {self.what} while {self.taken} are in progress",
                accepted=f"{self.limit} {self.what} at a time",
                retry_after_s=self.estimate_s(self.taken + places - self.limit, self.limit),
            )

    @contextmanager
    def held(self, places: int = 1) -> Iterator[Stay]:
        """Hold places while inside; raises as :meth:`check`."""
        self.check(places)
        self.taken += places
        stay = Stay()
        try:
            yield stay
        finally:
            self.taken -= places
            if stay.seconds is not None:
                self._seconds_each += SMOOTHING * (stay.seconds / places - self._seconds_each)

    def estimate_s(self, pictures: int, at_a_time: int) -> float:
        """Whole seconds, at least 1, until `pictures` should be done, `at_a_time` at once, as the latest edits took."""
        return float(max(1, math.ceil(self._seconds_each * pictures / at_a_time)))
