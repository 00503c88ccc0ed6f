"""A scheduler that takes rows from a worker: they are computed later, and nothing counts as lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import finish_time
from giornata.scheduling.queue import RowQueue
from giornata.scheduling.scheduler import QueueOrderScheduler, SchedulingDecision
from giornata.scheduling.worker_state import Attempt
from giornata.wire.jobs import JobState
from giornata.wire.requests import Reuse
from tests.fakes.denoiser import FakeDenoiser
from tests.integration.router.bench import Bench, make_job, running_router


@dataclass
class Preempting:
    """Serves jobs in their turn, and takes from workers what it is told to take."""

    serves: QueueOrderScheduler = field(default_factory=lambda: QueueOrderScheduler(finish_time))
    takes: list[Attempt] = field(default_factory=list)

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        found = tuple(attempt for attempt in self.takes if placement.worker(attempt) is not None)
        self.takes = [attempt for attempt in self.takes if attempt not in found]
        return self.serves.decide(line, placement, now)._replace(preemptions=found)


async def test_preempted_rows_are_handed_back_by_their_worker_and_placed_again(
    bench: Bench, nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Preempting()
    monkeypatch.setattr("giornata_router.service.scheduler_of", lambda *_: scheduler)
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=1)
    worker.going.clear()
    async with running_router(nats_account, "r"), worker.run():
        first, second = (make_job(reuse=Reuse.OFF) for _ in range(2))
        await bench.submit(first)
        await worker.news.until(lambda: bool(worker._running))
        await bench.submit(second)
        scheduler.takes.append((first.job_id, 1))
        await worker.news.until(lambda: len(worker.requests) > 1)
        worker.going.set()
        ended = [await bench.ended(job) for job in (first, second)]
    assert [event.state for event in ended] == [JobState.COMPLETED] * 2
    assert worker.cancelled == [first.job_id], "its worker is told once to hand the rows back"
    assert [request.job.job_id for request in worker.requests].count(first.job_id) == 2
    record = await bench.records.get(first.job_id)
    assert (record.attempt, len(record.causes), record.causes) == (2, 0, ())


async def test_rows_of_one_tenant_give_way_to_another_s_and_go_on_from_their_step(
    bench: Bench, nats_account: str
) -> None:
    """Alice's long edits fill the worker and its queue; bob's comes at once and is the only one that may end."""
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=2)
    worker.going.clear()
    async with running_router(nats_account, "r"), worker.run():
        alices = [make_job(reuse=Reuse.OFF, tenant="alice") for _ in range(6)]
        for job in alices:
            await bench.submit(job)
        await worker.news.until(lambda: len(worker._running) == 2)
        bobs = make_job(reuse=Reuse.OFF, tenant="bob")
        await bench.submit(bobs)
        await worker.news.until(lambda: any(one.job.tenant == "bob" for one in worker.requests))
        backs = set(worker.cancelled)
        assert backs
        assert backs <= {job.job_id for job in alices}
        worker.going.set()
        ended = [await bench.ended(job) for job in (bobs, *alices)]
    assert [event.state for event in ended] == [JobState.COMPLETED] * 7
    for back in backs:
        assert (await bench.records.get(back)).causes == ()
        assert any(one.job.job_id == back and one.rows[0].resume for one in worker.requests)
