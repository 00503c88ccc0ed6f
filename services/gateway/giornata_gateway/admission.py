"""How many pictures may be in progress at this gateway at a time. Pure: durations are arguments.

An edit holds as many places as it has pictures from the moment its request is known to the moment it is answered; an
asynchronous job only until it is accepted, since from there on the router's queue limit counts it.
"""

from __future__ import annotations

import math

from giornata.errors import ServiceUnavailable, TooManyRequests

SMOOTHING = 0.2
"""Weight of the latest edit in the running mean of how long a picture takes."""


class Admission:
    """Counts rows in progress against a limit; a single edit always fits into an idle gateway."""

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = limit_rows
        self.rows = 0
        """In progress now."""
        self.closed = False
        """Draining: nothing more is admitted."""
        self._seconds_per_row = 1.0

    def enter(self, rows: int, held: int = 0) -> None:
        """Take places for `rows` in all, of which this request holds `held` already.

        Raises:
            TooManyRequests: no room; says when there may be.
            ServiceUnavailable: the gateway is shutting down.
        """
        if self.closed:
            raise ServiceUnavailable("This gateway is shutting down.", retry_after_s=1)
        others = self.rows - held
        if others and others + rows > self.limit_rows:
            raise TooManyRequests(
                received=f"{rows} pictures while {others} are in progress",
                accepted=f"{self.limit_rows} pictures at a time",
                retry_after_s=self.retry_after_s(others + rows - self.limit_rows),
            )
        self.rows += rows - held

    def leave(self, rows: int, seconds: float | None = None) -> None:
        """Give places back; `seconds` is how long an edit that was carried out took."""
        self.rows -= rows
        if seconds is not None and rows:
            self._seconds_per_row += SMOOTHING * (seconds / rows - self._seconds_per_row)

    def retry_after_s(self, excess_rows: int) -> float:
        """Whole seconds until `excess_rows` places should be free, judged by the latest edits."""
        return float(max(1, math.ceil(self._seconds_per_row * excess_rows / self.limit_rows)))
