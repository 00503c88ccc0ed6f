"""Deadlines on the monotonic clock of one process. Between processes, remaining milliseconds travel."""

from __future__ import annotations

import time
from dataclasses import dataclass

from giornata.wire.errors import DeadlineExceeded


@dataclass(frozen=True)
class Deadline:
    """A moment on this process's monotonic clock, in seconds."""

    at_s: float

    @classmethod
    def after_ms(cls, remaining_ms: float) -> Deadline:
        """The deadline that lies `remaining_ms` ahead of now."""
        return cls(time.monotonic() + remaining_ms / 1000)

    def remaining_s(self) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.at_s - time.monotonic())

    def remaining_ms(self) -> int:
        """Milliseconds left, not below zero: what travels in an envelope."""
        return int(self.remaining_s() * 1000)

    def at_most(self, seconds: float) -> Deadline:
        """This deadline or `seconds` from now, whichever comes first: a stage's own limit."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))

    def check(self) -> None:
        """Raise :class:`DeadlineExceeded` when no time is left."""
        if self.remaining_s() <= 0:
            raise DeadlineExceeded
