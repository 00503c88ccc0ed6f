"""The model's thread: one call at a time, those that finish an edit first, and no call for nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from giornata_prepost.worker_pools import CallPriority, ModelThread
from tests.patience import HUNG_S


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    made = ModelThread()
    yield made
    made.close()


class Held:
    """Occupies the thread until it is let go."""

    def __init__(self, thread: ModelThread) -> None:
        self._begun = asyncio.Event()
        self._gate = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(thread.timed(CallPriority.BEGIN, self._hold))

    async def begun(self) -> None:
        async with asyncio.timeout(HUNG_S):
            await self._begun.wait()

    def let_go(self) -> None:
        self._gate.set()

    def _hold(self) -> None:
        self._loop.call_soon_threadsafe(self._begun.set)
        assert self._gate.wait(HUNG_S)


async def test_what_finishes_an_edit_goes_before_what_begins_one(thread: ModelThread) -> None:
    order: list[str] = []
    held = Held(thread)
    await held.begun()
    calls = [
        asyncio.create_task(thread.timed(turn, order.append, name))
        for turn, name in (
            (CallPriority.BEGIN, "encode 1"),
            (CallPriority.FINISH, "decode 1"),
            (CallPriority.BEGIN, "encode 2"),
            (CallPriority.FINISH, "decode 2"),
        )
    ]
    await asyncio.sleep(0)  # each puts itself in the queue at its first step
    held.let_go()
    await asyncio.gather(held.task, *calls)
    assert order == ["decode 1", "decode 2", "encode 1", "encode 2"]


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(thread: ModelThread) -> None:
    ran: list[str] = []
    held = Held(thread)
    await held.begun()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.timed(CallPriority.FINISH, ran.append, "cancelled")
    other = asyncio.create_task(thread.timed(CallPriority.BEGIN, ran.append, "other"))
    held.let_go()
    await asyncio.gather(held.task, other)
    assert ran == ["other"]


async def test_results_and_errors_come_back_to_their_caller(thread: ModelThread) -> None:
    results = await asyncio.gather(
        thread.timed(CallPriority.BEGIN, divmod, 7, 2),
        thread.timed(CallPriority.FINISH, divmod, 7, 0),
        return_exceptions=True,
    )
    assert isinstance(results[0], tuple)
    assert results[0][0] == (3, 1)
    assert results[0][1] >= 0
    assert isinstance(results[1], ZeroDivisionError)
