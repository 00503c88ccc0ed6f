"""Retry policies: every one of the system, by name.

A policy is used as ``await policy(function, *args)`` or as ``@policy.wraps``; tenacity awaits only what is defined by
``async def``. When its time is over it raises the last error as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import nats.errors
from nats.js.errors import (
    BadRequestError,
    KeyNotFoundError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)
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

from giornata.bus.connection import LostError
from giornata.wire.errors import Overloaded

COMING_UP_S: Final = 30.0
"""How long we wait for a cluster of NATS servers that comes up."""
LEADERLESS_S: Final = 15.0
"""How long we wait for a cluster that chooses a leader; Raft waits four to nine seconds before it replaces one."""
_NO_SUITABLE_PEERS: Final = 10005
"""JetStream's error code: fewer servers are up than replicas are asked for."""
_NOT_TAKEN: Final = (NoStreamResponseError, KeyNotFoundError)

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]
Stop = stop_base | Callable[[RetryCallState], bool]


def soon(errors: Errors, limit_s: float) -> AsyncRetrying:
    """For a service that another instance replaces within seconds, while a client waits for the answer."""
    return _jittered(retry_if_exception_type(errors), 0.05, 0.5, stop_after_delay(limit_s))


def patiently(errors: Errors, limit_s: float | None = None) -> AsyncRetrying:
    """For a server that may be away for a while; without `limit_s`, until it is back."""
    stop = stop_never if limit_s is None else stop_after_delay(limit_s)
    return _jittered(retry_if_exception_type(errors), 0.1, 2, stop)


def elsewhere(worth_it: Callable[[BaseException], bool], stop: Stop) -> AsyncRetrying:
    """For a stage of a job that another instance may do: soon where one is busy, ever later where it fails."""
    busy, failing = (wait_random_exponential(multiplier=0.2, max=most_s) for most_s in (2, 30))

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return (busy if isinstance(error, Overloaded) else failing)(state)

    return AsyncRetrying(retry=retry_if_exception(worth_it), wait=wait, stop=stop, reraise=True)


def until_led(worth_it: Callable[[BaseException], bool], limit_s: float) -> AsyncRetrying:
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


async def ask_jetstream(ask: Callable[[], Awaitable[T]], limit_s: float = LEADERLESS_S) -> T:
    """The answer of JetStream to a question that may be asked twice: a read, or the creation of what may exist."""
    return await retry(partial(until_led, _has_no_leader, limit_s), ask)


async def read_just_made(read: Callable[[], Awaitable[T]], limit_s: float = COMING_UP_S) -> T:
    """The answer to a read of a stream or bucket that was made a moment ago, by whomever.

    A cluster of servers says that it exists as soon as it is agreed upon; a server that has not applied it says that
    there is none.
    """
    return await retry(partial(until_led, _may_not_be_applied, limit_s), read)


async def write_to_jetstream(write: Callable[[], Awaitable[T]]) -> T:
    """The answer of JetStream to a write, which is tried again only if it was surely not taken.

    After a TimeoutError or LostError it may have been taken. A creation meets KeyNotFoundError where another writer was
    faster, and a cluster of servers has taken that record but not applied it: nobody can read it yet.
    """
    return await retry(partial(until_led, lambda error: isinstance(error, _NOT_TAKEN), LEADERLESS_S), write)


def error_code(error: BaseException) -> int | None:
    """JetStream's code of an error. An error that the client makes has none, nor even the attribute."""
    return getattr(error, "err_code", None)


def _has_no_leader(error: BaseException) -> bool:
    if isinstance(error, BadRequestError):
        return error_code(error) == _NO_SUITABLE_PEERS
    return isinstance(error, (ServiceUnavailableError, nats.errors.TimeoutError, LostError))


def _may_not_be_applied(error: BaseException) -> bool:
    return isinstance(error, NotFoundError) or _has_no_leader(error)


def _jittered(worth_it: retry_base, first_s: float, most_s: float, stop: Stop) -> AsyncRetrying:
    """Full jitter: up to `first_s` before the second try, twice that before the third, at most `most_s`."""
    wait = wait_random_exponential(multiplier=first_s, max=most_s)
    return AsyncRetrying(retry=worth_it, wait=wait, stop=stop, reraise=True)
