"""Deadlines, lost cancellation, and retry policies by name: how long a process waits, and when it tries again.

A policy is used as ``await policy(function, *args)`` or as ``@policy.wraps``; tenacity awaits only what is defined by
``async def``. When its time is over it raises the last error as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_random_exponential,
)
from tenacity.retry import retry_base
from tenacity.stop import stop_base

from giornata.wire.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]
Stop = stop_base | Callable[[RetryCallState], bool]


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


def retry_soon(errors: Errors, limit_s: float) -> AsyncRetrying:
    """For a service that another instance replaces within seconds, while a client waits for the answer."""
    return _jittered(retry_if_exception_type(errors), 0.05, 0.5, stop_after_delay(limit_s))


def retry_patiently(errors: Errors, limit_s: float | None = None) -> AsyncRetrying:
    """For a server that may be away for a while; without `limit_s`, until it is back."""
    stop = stop_never if limit_s is None else stop_after_delay(limit_s)
    return _jittered(retry_if_exception_type(errors), 0.1, 2, stop)


def retry_elsewhere(worth_it: Callable[[BaseException], bool], stop: Stop) -> AsyncRetrying:
    """For a stage of a job that another instance may do: soon where one is busy, ever later where it fails."""
    busy, failing = (wait_random_exponential(multiplier=0.2, max=most_s) for most_s in (2, 30))

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return (busy if isinstance(error, Overloaded) else failing)(state)

    return AsyncRetrying(retry=retry_if_exception(worth_it), wait=wait, stop=stop, reraise=True)


def retry_until_led(worth_it: Callable[[BaseException], bool], limit_s: float) -> AsyncRetrying:
    """For JetStream, which chooses a leader: meanwhile a read gets no answer, and a write is refused at once."""
    return _jittered(retry_if_exception(worth_it), 0.1, 1, stop_after_delay(limit_s))


async def retry(policy: Callable[[], AsyncRetrying], ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, tried again as the policy says; nothing but `ask` costs time where the first try succeeds.

    The policy, made at the first failure, counts that one, and counts its time from it.
    """
    try:
        return await ask()
    except Exception as error:  # noqa: BLE001 - the policy raises what it does not try again
        failures = [error]

    async def after_the_first() -> T:
        if failures:
            raise failures.pop()
        return await ask()

    return await policy()(after_the_first)


def _jittered(worth_it: retry_base, first_s: float, most_s: float, stop: Stop) -> AsyncRetrying:
    """Full jitter: up to `first_s` before the second try, twice that before the third, at most `most_s`."""
    wait = wait_random_exponential(multiplier=first_s, max=most_s)
    return AsyncRetrying(retry=worth_it, wait=wait, stop=stop, reraise=True)
