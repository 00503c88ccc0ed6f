"""An attempt at a worker, from its sending to its outcome, with what the router tells the worker meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from giornata.deadlines import Deadline
from giornata.wire.jobs import Assignment, JobRecord, JobState
from giornata.wire.messages import DenoisedEvent, RunAnswer, RunReply, RunRequest
from giornata_router.denoise_stage import DenoiseStage
from giornata_router.dispatch import NoReport, Outcome
from giornata_router.job_context import LiveJobRecord, RouterContext, StageTimer
from giornata_router.rules import job_records
from giornata_router.rules.job_records import JobTimes
from tests.contract.messages import ENCODING, INSPECTION, JOB, REF
from tests.patience import HUNG_MS

GIVEN = Assignment(1, "d1", (0,))


class World:
    """A worker, the record, and the outcomes that are reported, one after the other; the last one computes the rows."""

    def __init__(self, *outcomes: Outcome) -> None:
        accepted, times = job_records.accepted(JOB), StageTimer(job_records.accepted(JOB)).times()
        self.record = job_records.assigned(accepted, [GIVEN], INSPECTION, ENCODING, JobTimes(*times))
        self.outcomes = [*outcomes]
        self.expected = 0
        """Attempts that are waited for."""
        self.told: list[tuple[str, bool]] = []
        """What the worker was told, and whether it is to hand its rows back."""
        self.job, self.sheet, self.deadline = JOB, StageTimer(accepted), Deadline.after_ms(HUNG_MS)
        self.doing = ""

    @asynccontextmanager
    async def expecting(self, job_id: str, attempt: int) -> AsyncIterator[asyncio.Future[Outcome]]:
        assert (job_id, attempt) == (JOB.job_id, GIVEN.attempt)
        self.expected += 1
        yield self.expect_again((job_id, attempt))
        self.expected -= 1

    def expect_again(self, attempt: tuple[str, int]) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        future.set_result(self.outcomes.pop(0))
        return future

    async def run(self, worker: str, request: RunRequest, limit: Deadline) -> RunReply:
        assert (worker, request.attempt) == (GIVEN.worker, GIVEN.attempt)
        self.told.append(("run", False))
        return RunReply(answer=RunAnswer.ACCEPTED)

    async def drop(self, job_id: str, assignment: Assignment, *, hand_back: bool = False) -> None:
        assert (job_id, assignment) == (JOB.job_id, GIVEN)
        self.told.append(("drop", hand_back))

    async def tell(self, state: JobState, attempt: int) -> None:
        assert (state, attempt) == (JobState.RUNNING, GIVEN.attempt)

    async def reread(self) -> JobRecord:
        """The worker has written what it computed."""
        rows = tuple(row.model_copy(update={"latents": REF, "worker": None}) for row in self.record.rows)
        return self.record.model_copy(update={"rows": rows})


def computed(*, handed_back: bool = False) -> DenoisedEvent:
    return DenoisedEvent(
        job_id=JOB.job_id, attempt=1, worker="d1", denoise_ms=1, wait_ms=0, handed_back=handed_back
    )


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ((computed(),), []),
        ((NoReport.RECHECK,), []),
        ((NoReport.PREEMPTED, computed(handed_back=True)), [("drop", True)]),
        ((NoReport.PREEMPTED, NoReport.PREEMPTED, computed()), [("drop", True)] * 2),
    ],
)
async def test_a_worker_is_told_to_hand_back_rows_that_others_come_before(
    outcomes: tuple[Outcome, ...], told: list[tuple[str, bool]]
) -> None:
    world = World(*outcomes)
    tools = SimpleNamespace(dispatch=world, workers=world, config=SimpleNamespace(max_failures=3))
    computing = DenoiseStage(
        cast("RouterContext", tools), cast("LiveJobRecord", world), INSPECTION, ENCODING, None
    )
    await computing._attempt(GIVEN, world.record.pending_rows, adopted=False)
    assert world.told == [("run", False), *told]
    assert (world.outcomes, world.expected) == ([], 0)
