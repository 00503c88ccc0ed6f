"""Asking JetStream again: a cluster that comes up, or has lost a server, has no leader for some seconds.

Raft waits four to nine seconds before it replaces a leader. Meanwhile a read gets no answer, and a write is refused at
once, since no server takes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import nats.errors
from nats.js.errors import BadRequestError, NoStreamResponseError, ServiceUnavailableError

from giornata import retries
from giornata.bus.connection import LostError

COMING_UP_S: Final = 30.0
"""How long we wait for a cluster that comes up."""
LEADERLESS_S: Final = 15.0
"""How long we wait for a cluster that chooses a leader."""
_NO_SUITABLE_PEERS: Final = 10005
"""JetStream's error code: fewer servers are up than replicas are asked for."""

T = TypeVar("T")


async def repeated(ask: Callable[[], Awaitable[T]], limit_s: float = LEADERLESS_S) -> T:
    """The answer to a question that may be asked twice: a read, or the creation of what may exist.

    Raises:
        nats.errors.Error: there is no answer within `limit_s`, or it is another error.
    """
    return await retries.until_led(_has_no_leader, limit_s)(_awaited, ask)


async def written(write: Callable[[], Awaitable[T]]) -> T:
    """The answer to a write, which is tried again only if it was surely not taken.

    Raises:
        nats.errors.Error: as :func:`repeated`; after a TimeoutError or LostError it may have been taken.
    """
    return await retries.until_led(_was_not_taken, LEADERLESS_S)(_awaited, write)


async def _awaited(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()


def _was_not_taken(error: BaseException) -> bool:
    return isinstance(error, NoStreamResponseError)


def _has_no_leader(error: BaseException) -> bool:
    if isinstance(error, BadRequestError):
        return getattr(error, "err_code", None) == _NO_SUITABLE_PEERS  # errors made by the client have none
    return isinstance(error, (ServiceUnavailableError, nats.errors.TimeoutError, LostError))
