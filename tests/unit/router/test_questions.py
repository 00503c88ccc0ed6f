"""A question to prepost is lost when nobody says to have it; who waits for its answer is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from giornata.fleet import SILENCE_S
from giornata.wire.errors import DeadlineExceeded
from giornata.wire.workers import ServiceName, ServiceState
from giornata_router.prepost import PrepostRequests


def prepost(*answering: str, instance: str = "p1") -> ServiceState:
    return ServiceState(
        service=ServiceName.PREPOST, instance=instance, host="h", version="1", ready=True, answering=answering
    )


@asynccontextmanager
async def asking(questions: PrepostRequests, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Somebody who waits for an answer; looked at before and after, and left when the test is over."""

    async def wait() -> None:
        async with questions.asked(name):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_question_that_nobody_has_is_lost_after_a_while() -> None:
    questions = PrepostRequests()
    before = time.monotonic()
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        questions.observe(prepost("inspect b"), now + 1)
        questions.look(before + SILENCE_S - 0.1)
        await settled()
        assert not task.done()
        questions.look(now + SILENCE_S + 0.1)
        with pytest.raises(DeadlineExceeded, match="lost"):
            await task


async def test_a_question_that_somebody_has_is_waited_for_however_long() -> None:
    questions = PrepostRequests()
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        for second in range(1, 60):
            questions.observe(prepost("inspect a"), now + second)
            questions.observe(prepost(instance="p2"), now + second)
            questions.look(now + second)
        questions.look(now + 59 + SILENCE_S - 0.1)  # its owner has said nothing since
        await settled()
        assert not task.done()
        questions.look(now + 59 + SILENCE_S + 0.1)
        with pytest.raises(DeadlineExceeded):
            await task


async def test_nothing_is_lost_while_one_cannot_know() -> None:
    questions = PrepostRequests(lambda: False)
    async with asking(questions, "inspect a") as task:
        now = time.monotonic()
        for later_s in (100, 100 + SILENCE_S - 0.1):
            questions.look(now + later_s)
            await settled()
            assert not task.done()
