"""The carrier forgets an attempt however its task ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from giornata.messages import RunAnswer, RunRequest
from giornata_denoiser.batch import Capacity
from giornata_denoiser.carrying import Carrier
from giornata_denoiser.engine import Engine
from giornata_denoiser.loop import EngineLoop
from giornata_denoiser.row import Row
from tests.fakes import tiny_flux
from tests.unit.test_denoiser_assignments import request


async def fetch_for_ever(request: RunRequest) -> tuple[Row, ...]:
    await asyncio.Event().wait()
    return ()


async def publish_nothing(*event: object) -> None:
    raise AssertionError("an attempt that was dropped is not told of")


def carrier(tasks: asyncio.TaskGroup) -> Carrier:
    engine = Engine(tiny_flux.family(), Capacity(rows=2, tokens=1000), lambda: 0.0)
    return Carrier(
        "worker",
        capacity_rows=2,
        engine=EngineLoop(engine, lambda report: None, lambda error: None),
        fetch=fetch_for_ever,
        outcomes=cast("Any", None),
        publish=publish_nothing,
        tasks=tasks,
    )


async def test_a_cancel_that_overtakes_the_tasks_first_step_leaves_nothing_behind() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a")) is RunAnswer.ACCEPTED
        made.drop_job("a")  # nothing has been awaited since
    assert list(made.assignments) == []


async def test_a_newer_attempt_has_the_room_of_the_older_at_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a", attempt=1)) is RunAnswer.ACCEPTED
        assert made.take(request("b")) is RunAnswer.FULL
        assert made.take(request("a", attempt=2)) is RunAnswer.ACCEPTED
        await asyncio.sleep(0)  # the older task ends
        assert [assignment.key for assignment in made.assignments] == [("a", 2)]
        made.drop_job("a")
    assert list(made.assignments) == []


async def test_a_dropped_attempt_is_forgotten_while_it_fetches() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        made.take(request("a"))
        await asyncio.sleep(0)
        made.drop(("a", 1))
    assert list(made.assignments) == []
