"""A job's events from the stream: each once and in order, whatever the consumer repeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.wire import codec, subjects
from giornata.wire.jobs import JobState
from giornata.wire.messages import DoneEvent, EventKind, StateEvent, StepEvent
from giornata.wire.values import StageTimes
from giornata_gateway.jobs.records import StreamedEvent, open_feed

JOB = "job_1"


class Stream:
    """A bus with one stream, whose ordered consumer a test drives."""

    def __init__(self, *, missing: bool = False) -> None:
        self.jetstream = self
        self.missing = missing
        self.open = 0
        self.after: list[int | None] = []
        self.hear: Callable[[StepEvent], None]
        self._receive: Callable[[Msg], Awaitable[None]]

    async def subscribe(self, subject: str, *, cb: Any, config: Any, **_: object) -> Stream:
        if self.missing:
            raise NotFoundError
        self._receive = cb
        self.after.append(config.opt_start_seq)
        self.open += 1
        return self

    async def unsubscribe(self) -> None:
        self.open -= 1

    @asynccontextmanager
    async def listen(self, subject: str, kind: object, hear: Any) -> AsyncIterator[None]:
        self.hear = hear
        yield

    async def deliver(self, sequence: int, kind: EventKind, event: BaseModel) -> None:
        metadata = SimpleNamespace(
            sequence=SimpleNamespace(stream=sequence), timestamp=datetime.fromtimestamp(1000 + sequence, UTC)
        )
        subject = subjects.event("g", JOB, kind)
        message = SimpleNamespace(metadata=metadata, subject=subject, data=codec.encode(event))
        await self._receive(cast("Msg", message))


def state(of: JobState) -> StateEvent:
    return StateEvent(job_id=JOB, attempt=0, state=of)


def step(number: int) -> StepEvent:
    return StepEvent(job_id=JOB, attempt=0, index=0, step=number, steps=4)


DONE = DoneEvent(job_id=JOB, state=JobState.COMPLETED, stage_ms=StageTimes())


def told(queue: asyncio.Queue[StreamedEvent | None]) -> list[tuple[int | None, str]]:
    """Sequence and kind of what a reader has been told."""
    found = [queue.get_nowait() for _ in range(queue.qsize())]
    return [(item.sequence, type(item.event).__name__) for item in found if item is not None]


async def nothing() -> None:
    """There is nothing to be restored."""


async def test_a_consumer_that_begins_again_where_it_was_interrupted_tells_nothing_twice() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB, 0, nothing) as queue:
        await stream.deliver(3, EventKind.STATE, state(JobState.PREPARING))
        await stream.deliver(5, EventKind.STATE, state(JobState.RUNNING))
        for sequence in (3, 5):
            await stream.deliver(sequence, EventKind.STATE, state(JobState.RUNNING))
        await stream.deliver(8, EventKind.DONE, DONE)
        await stream.deliver(8, EventKind.DONE, DONE)
        assert told(queue) == [(3, "StateEvent"), (5, "StateEvent"), (8, "DoneEvent")]
    assert (stream.after, stream.open) == ([None], 0)


async def test_a_reader_that_comes_again_is_told_what_it_has_not_had() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB, 5, nothing) as queue:
        stream.hear(step(2))
        await stream.deliver(5, EventKind.STATE, state(JobState.RUNNING))
        await stream.deliver(6, EventKind.DONE, DONE)
        assert told(queue) == [(None, "StepEvent"), (6, "DoneEvent")]
    assert stream.after == [6]


async def test_steps_are_held_back_until_the_stream_tells_that_the_job_is_running() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB, 0, nothing) as queue:
        stream.hear(step(1))
        await stream.deliver(1, EventKind.STATE, state(JobState.PREPARING))
        assert told(queue) == [(1, "StateEvent")]
        await stream.deliver(2, EventKind.STATE, state(JobState.RUNNING))
        stream.hear(step(2))
        assert told(queue) == [(2, "StateEvent"), (None, "StepEvent"), (None, "StepEvent")]


async def test_a_stream_that_is_gone_is_made_again_before_it_is_read() -> None:
    stream = Stream(missing=True)

    async def restore() -> None:
        stream.missing = False

    async with open_feed(cast("Bus", stream), JOB, 0, restore) as queue:
        await stream.deliver(1, EventKind.DONE, DONE)
        assert told(queue) == [(1, "DoneEvent")]
    with pytest.raises(NotFoundError):
        async with open_feed(cast("Bus", Stream(missing=True)), JOB, 0, nothing):
            pass
