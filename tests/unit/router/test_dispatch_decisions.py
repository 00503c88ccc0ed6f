"""Dispatch applies what a scheduler decides: when it wants to be asked again, and which attempts it preempts."""

from __future__ import annotations

import asyncio

import pytest

from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import FairQueue, RowQueue
from giornata.scheduling.scheduler import Scheduler, SchedulingDecision
from giornata_router.dispatch import Dispatch
from tests.patience import HUNG_S
from tests.unit.scheduling.test_placement import worker


class Scripted:
    """A scheduler that decides what it was told to, and notes when it is asked."""

    def __init__(self, *decisions: SchedulingDecision) -> None:
        self.decisions = list(decisions)
        self.asked = asyncio.Semaphore(0)

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        self.asked.release()
        decision = self.decisions.pop(0) if self.decisions else SchedulingDecision()
        return decision._replace(wake_at=None if decision.wake_at is None else now + decision.wake_at)


def scripted(scheduler: Scheduler) -> Dispatch:
    return Dispatch(scheduler, Placement(), FairQueue())


async def test_the_scheduler_is_asked_again_when_it_wants_to_be_and_at_no_older_time() -> None:
    scheduler = Scripted(
        SchedulingDecision(wake_at=0.01), SchedulingDecision(wake_at=3600.0), SchedulingDecision(wake_at=0.02)
    )
    dispatch = scripted(scheduler)
    dispatch.observe(worker("d1"))
    dispatch.observe(worker("d1"))  # its decision counts, not that before it
    for _ in range(2):
        await scheduler.asked.acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scheduler.asked.acquire(), 0.1)
    dispatch.observe(worker("d1"))
    for _ in range(2):  # at once, and when it woke
        await asyncio.wait_for(scheduler.asked.acquire(), HUNG_S)
    assert dispatch._wake is None
