"""When what has failed is tried again: every policy of the system, by name.

A policy is used as ``await policy(function, *args)`` or as ``@policy.wraps``; tenacity awaits only what is defined by
``async def``. When its time is over it raises the last error as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_fixed,
    wait_random_exponential,
)
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

Errors = type[Exception] | tuple[type[Exception], ...]


def soon(errors: Errors, limit_s: float) -> AsyncRetrying:
    """For a service that another instance replaces within seconds, while a client waits for the answer."""
    return _retrying(retry_if_exception_type(errors), _random(0.05, 0.5), stop_after_delay(limit_s))


def patiently(errors: Errors, limit_s: float | None = None) -> AsyncRetrying:
    """For a server that may be away for a while; without `limit_s`, until it is back."""
    stop = stop_never if limit_s is None else stop_after_delay(limit_s)
    return _retrying(retry_if_exception_type(errors), _random(0.1, 2), stop)


def until_led(worth_it: Callable[[BaseException], bool], limit_s: float) -> AsyncRetrying:
    """For JetStream, which chooses a leader; see :mod:`giornata.bus.patience`."""
    return _retrying(retry_if_exception(worth_it), _random(0.1, 1), stop_after_delay(limit_s))


def elsewhere(
    worth_it: Callable[[BaseException], bool], stop: Callable[[RetryCallState], bool]
) -> AsyncRetrying:
    """For a stage of a job that another instance may do."""
    return _retrying(retry_if_exception(worth_it), _random(0.2, 2), stop)


def polling(errors: Errors, limit_s: float) -> AsyncRetrying:
    """For a process of this host that is about to be ready."""
    return _retrying(retry_if_exception_type(errors), wait_fixed(0.05), stop_after_delay(limit_s))


def _retrying(
    worth_it: retry_base, wait: wait_base, stop: stop_base | Callable[[RetryCallState], bool]
) -> AsyncRetrying:
    return AsyncRetrying(retry=worth_it, wait=wait, stop=stop, reraise=True)


def _random(first_s: float, most_s: float) -> wait_base:
    """Full jitter: up to `first_s` before the second try, twice that before the third, at most `most_s`."""
    return wait_random_exponential(multiplier=first_s, max=most_s)
