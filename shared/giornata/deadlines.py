"""Deadlines on the monotonic clock of one process, and cancellation that something below has lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from giornata.wire.errors import DeadlineExceeded


def heed_cancel() -> None:
    """Raise what Python 3.11's wait_for, which nats-py uses, may have swallowed: that this task is cancelled.

    A task that went on would wait for ever, or begin tasks in a group that ends.
    """
    if _cancels():
        raise asyncio.CancelledError


@contextmanager
def heeding_cancel() -> Iterator[None]:
    """Raise on leaving if the task was cancelled inside and did not notice, as :func:`heed_cancel`.

    A task that was cancelled before, and puts things in order, goes on.
    """
    before = _cancels()
    try:
        yield
    except Exception as error:  # a failure does not hide the cancellation that came with it
        if _cancels() > before:
            raise asyncio.CancelledError from error
        raise
    if _cancels() > before:
        raise asyncio.CancelledError


def _cancels() -> int:
    """Return how often the running task was cancelled."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


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
