"""Policies of retrying: what is asked again, and what is not because it may have been done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import nats.errors
import pytest
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)
from tenacity import AsyncRetrying, stop_after_attempt

from giornata.bus import connection
from giornata.bus.connection import LostError, RefusedError, ask_jetstream, read_just_made, write_to_jetstream
from giornata.deadlines import retry_elsewhere, retry_patiently, retry_soon

Ask = Callable[[], Awaitable[str]]
REFUSED = RefusedError("publish", "x")


def failing(error: Exception, times: int) -> tuple[Ask, list[int]]:
    """Fails so often, then answers; and how often it was asked."""
    asked: list[int] = []

    async def ask() -> str:
        asked.append(1)
        if len(asked) <= times:
            raise error
        return "answer"

    return ask, asked


@pytest.mark.parametrize("policy", [retry_soon, retry_patiently])
async def test_a_policy_tries_its_errors_again_until_its_time_is_over(
    policy: Callable[..., AsyncRetrying],
) -> None:
    ask, asked = failing(REFUSED, 2)
    assert await policy(RefusedError, 30)(ask) == "answer"
    assert len(asked) == 3
    ask, asked = failing(KeyError(), 1)
    with pytest.raises(KeyError):
        await policy(RefusedError, 30)(ask)
    assert len(asked) == 1
    ask, _ = failing(REFUSED, 10_000)
    with pytest.raises(RefusedError):
        await policy(RefusedError, 0)(ask)
    ask, _ = failing(REFUSED, 1)
    assert await policy(RefusedError, 30).wraps(ask)() == "answer"


async def test_a_stage_stops_where_its_caller_says() -> None:
    ask, asked = failing(REFUSED, 10_000)
    with pytest.raises(RefusedError):
        await retry_elsewhere(lambda _error: True, stop_after_attempt(2))(ask)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("tried", "again", "never"),
    [
        (
            ask_jetstream,
            [nats.errors.TimeoutError(), LostError(), ServiceUnavailableError()],
            [
                NotFoundError(),
                BadRequestError(),
                KeyWrongLastSequenceError(),
                REFUSED,
                NoStreamResponseError(),
            ],
        ),
        (read_just_made, [BucketNotFoundError(), ServiceUnavailableError()], [BadRequestError()]),
        (
            write_to_jetstream,
            [NoStreamResponseError(), KeyNotFoundError()],
            [nats.errors.TimeoutError(), LostError()],
        ),
    ],
)
async def test_jetstream_is_asked_again_where_that_does_nothing_twice(
    tried: Callable[[Ask], Awaitable[str]], again: list[Exception], never: list[Exception]
) -> None:
    for error in again:
        ask, asked = failing(error, 2)
        assert await tried(ask) == "answer"
        assert len(asked) == 3
    for error in never:
        ask, asked = failing(error, 1)
        with pytest.raises(type(error)):
            await tried(ask)
        assert len(asked) == 1


@pytest.mark.parametrize("tried", [partial(ask_jetstream, limit_s=0.2), read_just_made])
async def test_patience_ends(tried: Callable[[Ask], Awaitable[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "COMING_UP_S", 0.2)
    ask, _ = failing(nats.errors.TimeoutError(), 10_000)
    with pytest.raises(nats.errors.TimeoutError):
        await tried(ask)
