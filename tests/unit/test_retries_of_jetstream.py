"""What is asked again of a cluster without a leader, and what is not because it may have been done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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

from giornata.bus.connection import LostError, RefusedError
from giornata.retries import ask_jetstream, read_just_made, write_to_jetstream

REFUSED = RefusedError("publish", "x")


def failing(error: Exception, times: int) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """Fails so often, then answers; and how often it was asked."""
    asked: list[int] = []

    async def ask() -> str:
        asked.append(1)
        if len(asked) <= times:
            raise error
        return "answer"

    return ask, asked


@pytest.mark.parametrize("error", [nats.errors.TimeoutError(), LostError(), ServiceUnavailableError()])
async def test_a_question_is_asked_again(error: Exception) -> None:
    ask, asked = failing(error, 2)
    assert await ask_jetstream(ask) == "answer"
    assert len(asked) == 3


@pytest.mark.parametrize(
    "error",
    [NotFoundError(), BadRequestError(), KeyWrongLastSequenceError(), REFUSED, NoStreamResponseError()],
)
async def test_an_answer_that_says_no_is_an_answer(error: Exception) -> None:
    ask, asked = failing(error, 1)
    with pytest.raises(type(error)):
        await ask_jetstream(ask)
    assert len(asked) == 1


async def test_what_was_just_made_may_be_away_for_a_moment() -> None:
    for error in (BucketNotFoundError(), ServiceUnavailableError()):
        ask, asked = failing(error, 2)
        assert await read_just_made(ask) == "answer"
        assert len(asked) == 3
    ask, asked = failing(BadRequestError(), 1)
    with pytest.raises(BadRequestError):
        await read_just_made(ask)
    ask, _ = failing(BucketNotFoundError(), 10_000)
    with pytest.raises(BucketNotFoundError):
        await read_just_made(ask, 0.2)


async def test_a_write_that_nobody_took_is_tried_again_and_one_that_may_be_taken_is_not() -> None:
    for untaken in (NoStreamResponseError(), KeyNotFoundError()):
        write, tried = failing(untaken, 2)
        assert await write_to_jetstream(write) == "answer"
        assert len(tried) == 3
    for error in (nats.errors.TimeoutError(), LostError()):
        write, tried = failing(error, 1)
        with pytest.raises(type(error)):
            await write_to_jetstream(write)
        assert len(tried) == 1


async def test_patience_ends() -> None:
    ask, _ = failing(nats.errors.TimeoutError(), 10_000)
    with pytest.raises(nats.errors.TimeoutError):
        await ask_jetstream(ask, 0.2)
