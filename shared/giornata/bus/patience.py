"""Asking JetStream again: a cluster that comes up, or has lost a server, has no leader for some seconds.

Raft waits four to nine seconds before it replaces a leader. What is read meanwhile is not answered, and what is written
is refused at once, since nobody takes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import nats.errors
from nats.js.errors import BadRequestError, NoStreamResponseError, ServiceUnavailableError

from giornata import retries
from giornata.bus.connection import LostError

COMING_UP_S: Final = 30.0
"""How long a cluster is waited for that comes up."""
LEADERLESS_S: Final = 15.0
"""How long one is waited for that chooses a leader."""
_NO_SUITABLE_PEERS: Final = 10005
"""Fewer servers of the cluster are up than there are to be replicas."""

T = TypeVar("T")


async def repeated(ask: Callable[[], Awaitable[T]], limit_s: float = LEADERLESS_S) -> T:
    """The answer to what may be asked twice: it reads, or makes what may be there already.

    Raises:
        nats.errors.Error: there is no answer within `limit_s`, or it is another error.
    """
    return await retries.until_led(_has_no_leader, limit_s)(_awaited, ask)


async def written(write: Callable[[], Awaitable[T]], limit_s: float = LEADERLESS_S) -> T:
    """What is answered to a write, which is tried again only where it was surely not taken.

    Raises:
        nats.errors.Error: as :func:`repeated`; after a TimeoutError or LostError it may have been taken.
    """
    return await retries.until_led(_was_not_taken, limit_s)(_awaited, write)


async def _awaited(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()


def _was_not_taken(error: BaseException) -> bool:
    return isinstance(error, NoStreamResponseError)


def _has_no_leader(error: BaseException) -> bool:
    if isinstance(error, BadRequestError):
        return getattr(error, "err_code", None) == _NO_SUITABLE_PEERS  # those that the client makes have none
    return isinstance(error, (ServiceUnavailableError, nats.errors.TimeoutError, LostError))
