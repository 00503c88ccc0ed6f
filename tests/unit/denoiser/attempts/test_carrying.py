"""The carrier forgets an attempt however its task ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from giornata.scheduling.batch import Capacity
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import JobState
from giornata.wire.messages import RunAnswer, RunRequest
from giornata.wire.progress import JobRecord, RowRecord
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.attempts.carrying import AttemptInputs, AttemptRunner, Fetch
from giornata_denoiser.attempts.outcomes import WrittenAttemptResult
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loop import EngineLoop
from tests.fakes import tiny_flux
from tests.unit.denoiser.attempts.test_attempt import request


@asynccontextmanager
async def fetch_for_ever(request: RunRequest) -> AsyncIterator[AttemptInputs]:
    await asyncio.Event().wait()
    yield AttemptInputs((), asyncio.sleep(0), asyncio.get_running_loop().create_future())


@asynccontextmanager
async def refuse(request: RunRequest) -> AsyncIterator[AttemptInputs]:
    if request.rows:
        raise InvalidField("strength leaves no step to compute.", field="strength")
    yield AttemptInputs((), asyncio.sleep(0), asyncio.get_running_loop().create_future())


async def publish_nothing(*event: object) -> None:
    raise AssertionError("an attempt that was dropped is not told of")


class Outcomes:
    """Keeps attempts whose outcome is written; they are void by then."""

    def __init__(self) -> None:
        self.written: list[Attempt] = []

    async def write(self, attempt: Attempt) -> WrittenAttemptResult:
        self.written.append(attempt)
        return WrittenAttemptResult(
            JobRecord(job=attempt.request.job, state=JobState.CANCELLED), superseded=()
        )

    async def forget(self, latents: object) -> None:
        """Keeps none."""


def carrier(
    tasks: asyncio.TaskGroup, fetch: Fetch = fetch_for_ever, outcomes: Any = None, capacity_rows: int = 2
) -> AttemptRunner:
    engine = Engine(tiny_flux.family(), Capacity(rows=2, tokens=1000), lambda: 0.0)
    return AttemptRunner(
        "worker",
        capacity_rows=capacity_rows,
        engine=EngineLoop(engine, lambda report: None, lambda error: None),
        fetch=fetch,
        outcomes=outcomes,
        publish=publish_nothing,
        tasks=tasks,
    )


async def test_a_cancel_that_overtakes_the_tasks_first_step_leaves_nothing_behind() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a")) is RunAnswer.ACCEPTED
        made.drop_job("a")  # nothing has been awaited since
    assert made.attempts == ()


async def test_a_newer_attempt_has_the_room_of_the_older_at_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a", attempt=1)) is RunAnswer.ACCEPTED
        assert made.take(request("b")) is RunAnswer.FULL
        assert made.take(request("a", attempt=2)) is RunAnswer.ACCEPTED
        await asyncio.sleep(0)  # the older task ends
        assert [attempt.key for attempt in made.attempts] == [("a", 2)]
        made.drop_job("a")
    assert made.attempts == ()


async def test_a_cancelled_job_leaves_with_every_attempt_and_no_other_job() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks, capacity_rows=3)
        for job_id, attempt, index in (("a", 1, 0), ("a", 2, 1), ("b", 1, 0)):
            rows = (RowRecord(index=index, seed=0),)
            assert made.take(request(job_id, attempt, rows)) is RunAnswer.ACCEPTED
        assert [attempt.key for attempt in made.attempts] == [("a", 1), ("a", 2), ("b", 1)]
        made.drop_job("a")
        assert [attempt.key for attempt in made.attempts] == [("b", 1)]
        made.drop_job("b")


async def test_a_dropped_attempt_is_forgotten_while_it_fetches() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        made.take(request("a"))
        await asyncio.sleep(0)
        made.drop(("a", 1))
    assert made.attempts == ()


async def test_what_cannot_be_computed_is_answered_and_not_lost() -> None:
    outcomes = Outcomes()
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks, refuse, outcomes)
        assert made.take(request("a")) is RunAnswer.ACCEPTED
    (attempt,) = outcomes.written
    assert [error.code for error in attempt.errors.values()] == ["invalid_field"] * 2
    assert made.attempts == ()
