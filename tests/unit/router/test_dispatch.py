"""Who gets a worker, in which order, and who hears that nothing more will be heard."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from giornata.fleet import SILENCE_S
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import CandidateWorker, Policy, finish_time
from giornata.scheduling.queue import FairQueue, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import QueueOrderScheduler, Scheduler, SchedulingDecision
from giornata.wire.jobs import Assignment, Priority
from giornata.wire.messages import CancelRows, DenoisedEvent, Epoch, SubmitRequest
from giornata.wire.workers import LoadSample, ServiceState, TemplateCounters, Tier
from giornata_lab.bench.systems.networks import plain
from giornata_router import job_queue as module
from giornata_router.admission import FinishTimeEstimator
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch, NoReport, RouterContext
from giornata_router.job_queue import LeaderJobQueue
from giornata_router.job_runner import HeldJob
from tests.contract.messages import JOB
from tests.fakes.fleet import worker_costs
from tests.patience import HUNG_S
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, row, telling, worker

TWO = replace(DEMAND, shapes=(SHAPE,) * 2)
FIRST = Assignment(1, "d1", (0,))


def dispatching(policy: Policy = finish_time, *, connected: bool = True) -> Dispatch:
    return Dispatch(QueueOrderScheduler(policy), Placement(), FairQueue(), lambda: connected)


def denoised(job_id: str, attempt: int) -> DenoisedEvent:
    return DenoisedEvent(job_id=job_id, attempt=attempt, worker="d1", denoise_ms=1, wait_ms=0)


async def acquired(
    dispatch: Dispatch,
    job: str,
    demand: JobDemand = DEMAND,
    priority: Priority = Priority.INTERACTIVE,
    fetching: str | None = None,
) -> list[Assignment]:
    """All that a job gets until all its rows have workers."""
    numbers, found = itertools.count(1), list[Assignment]()
    rows = range(demand.rows)
    async with dispatch.in_line(
        job, rows, demand, SchedulingParams(priority), numbers=numbers, fetching=fetching
    ) as waiting:
        while waiting.left or waiting.placed:
            given, _ = await waiting.news()
            found += given
    return found


class Waiters:
    """Jobs that ask for a worker, and the order in which they got one."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(
        self, job: str, demand: JobDemand = DEMAND, priority: Priority = Priority.INTERACTIVE
    ) -> asyncio.Task[None]:
        async def acquire() -> None:
            await acquired(self.dispatch, job, demand, priority)
            self.served.append(job)

        self.tasks[job] = asyncio.create_task(acquire())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.tasks[job]

    async def release(self, job: str) -> None:
        self.dispatch.release(job, 1)
        await asyncio.sleep(0)

    async def leave(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_what_nobody_has_asked_for_is_released_with_who_leaves_the_line() -> None:
    dispatch = dispatching()
    dispatch.observe(worker("d1", capacity=1))
    with contextlib.suppress(RuntimeError):
        async with dispatch.in_line(
            "j", (0, 1), TWO, SchedulingParams(), numbers=itertools.count(1)
        ) as waiting:
            assert len(waiting.placed) == 1
            raise RuntimeError
    assert dispatch.placement.has_room(DEMAND)
    left = weakref.ref(waiting)
    del waiting
    gc.collect()
    assert left() is None, "nothing is kept of who waits no more"
    assert len(dispatch.line) == 0


async def test_many_that_wait_cost_one_look_not_one_each() -> None:
    looks = 0

    def policy(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
        nonlocal looks
        looks += 1
        return finish_time(candidates, demand)

    dispatch = dispatching(policy)
    dispatch.observe(worker("d1", row("other", 0, 9), capacity=2))
    waiters = Waiters(dispatch)
    for i in range(50):
        await waiters.ask(f"j{i}", replace(DEMAND, shapes=(SHAPE,) * 2, together=True))
    looks = 0
    dispatch.observe(worker("d1", row("other", 1, 9), capacity=2))
    assert looks == 1
    dispatch.observe(worker("d1", row("other", 1, 9), row("another", 1, 9), capacity=2))
    assert looks == 1, "nobody has room"
    dispatch.observe(worker("d1", row("other", 1, 9), capacity=3))
    assert looks == 3, "one got it, and the next did not"
    await waiters.leave()


async def test_who_no_longer_wants_a_worker_leaves_it_to_the_next() -> None:
    dispatch = dispatching()
    waiters = Waiters(dispatch)
    (await waiters.ask("gone")).cancel()
    dispatch.observe(worker("d1", capacity=1))  # given, and not taken any more
    await waiters.ask("next")
    assert waiters.served == ["next"]
    assert len(dispatch.line) == 0


async def test_a_worker_that_refused_is_asked_again_after_its_next_telemetry() -> None:
    dispatch = dispatching()
    waiters = Waiters(dispatch)
    dispatch.observe(worker("d1"))
    dispatch.placement.refuse("d1")
    await waiters.ask("a")
    assert waiters.served == []
    dispatch.observe(worker("d1"))
    await waiters.tasks["a"]
    dispatch.placement.refuse("d1")
    dispatch.look(time.monotonic() + SILENCE_S + 1)


async def test_a_report_of_an_older_attempt_is_not_heard_and_one_of_this_only_once() -> None:
    dispatch = dispatching()
    dispatch.observe(worker("d1"))
    async with dispatch.expecting("a", 2) as report:
        dispatch.placement.assign("a", 2, "d1", DEMAND, time.monotonic())
        dispatch.report(denoised("a", 1))
        dispatch.report(denoised("a", 2).model_copy(update={"worker": "d0"}))
        assert not report.done()
        dispatch.report(denoised("a", 2))
        assert report.result() == denoised("a", 2)
        dispatch.report(denoised("a", 2))
    dispatch.report(denoised("a", 2))  # doubled, and late: nobody waits any more
    dispatch.report(denoised("unknown", 1))


@pytest.mark.parametrize("connected", [True, False])
async def test_silence_means_death_only_while_one_could_hear(connected: bool) -> None:
    dispatch = dispatching(connected=connected)
    dispatch.observe(worker("d1"))
    async with dispatch.expecting("a", 1) as report:
        dispatch.placement.assign("a", 1, "d1", DEMAND, time.monotonic())
        dispatch.look(time.monotonic() + SILENCE_S + 1)
        assert report.done() is connected
        if connected:
            assert report.result() is NoReport.LOST


async def test_after_a_reconnect_everybody_has_time_to_be_heard() -> None:
    dispatch = dispatching()
    dispatch.observe(worker("d1"))
    dispatch.placement.listen(-60)
    async with dispatch.expecting("a", 1) as report:
        dispatch.placement.assign("a", 1, "d1", DEMAND, time.monotonic())
        dispatch.recheck()
        assert report.result() is NoReport.RECHECK
    now = time.monotonic()
    async with dispatch.expecting("a", 1) as report:
        dispatch.placement.assign("a", 1, "d1", DEMAND, time.monotonic())
        dispatch.look(now + SILENCE_S - 0.1)
        assert not report.done()
        dispatch.observe(worker("d1"))
        dispatch.look(time.monotonic() + SILENCE_S + 0.1)
        assert report.done()


async def test_a_job_tells_the_worker_that_probably_gets_it_to_load() -> None:
    dispatch = dispatching()
    one, other = (replace(DEMAND, adapters=(NeededLora(name * 64, 10**9),)) for name in "ab")
    dispatch.observe(worker("d1", capacity=1))
    numbers = itertools.count(1)
    async with (
        dispatch.in_line("a", (0,), one, SchedulingParams(), numbers=numbers) as first,
        dispatch.in_line("b", (0,), other, SchedulingParams(), numbers=numbers) as second,
    ):
        ((_, where, _),), likely = await first.news()
        assert (where, likely) == ("d1", []), "it has its worker"
        assert await second.news() == ([], ["d1"])
        (entry,) = dispatch.line
        assert (entry.fetching, entry.told) == ("d1", frozenset({"d1"}))
        (known,) = dispatch.placement.candidates(entry.demand, 8)
        assert (known.load_ms, known.wait_ms > 0) == (0.0, True), "it counts as on its way"
        dispatch.release("a", 1)
        ((_, where, _),), likely = await second.news()
        assert (where, likely) == ("d1", [])


async def test_the_worker_that_reads_the_template_is_given_unless_it_has_become_busy() -> None:
    dispatch, demand = dispatching(), replace(DEMAND, template="t")
    assert dispatch.likely(demand) is None
    dispatch.observe(reading("d0"))
    dispatch.observe(reading("d1"))
    assert dispatch.likely(demand) == "d0"
    for job, told, given in (("a", "d1", "d1"), ("b", "d1", "d0"), ("c", "d0", "d0")):
        (assignment,) = await acquired(dispatch, job, demand, fetching=told)
        assert assignment.worker == given, "for the second on d1, reading it elsewhere ends sooner"
    dispatch.placement.refuse("d1")
    more = itertools.count()
    while dispatch.placement.has_room(demand):
        dispatch.placement.assign(f"more{next(more)}", 1, "d0", demand, 0.0)
    assert dispatch.likely(demand) == "d1", "no worker has room, and it will be empty first"


def reading(name: str) -> ServiceState:
    """A worker that has a template on disk; reading it takes a tenth of an edit's time."""
    return telling(
        worker(name),
        blocks=plain(1),
        cost_model=worker_costs(8.0, 0.0, 1.0),
        loads=(LoadSample(tier=Tier.DISK, size_bytes=1000, load_ms=16.0),),
        resident={Tier.DISK: ("t",)},
        templates=TemplateCounters(disk_bytes=1000),
    )


class Scripted:
    """A scheduler that decides what it was told to, and notes when it is asked."""

    def __init__(self, *decisions: SchedulingDecision) -> None:
        self.decisions = list(decisions)
        self.asked = asyncio.Semaphore(0)

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        self.asked.release()
        wake_at = self.decisions.pop(0).wake_at if self.decisions else None
        return SchedulingDecision(wake_at=None if wake_at is None else now + wake_at)


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


# The work queue's books, without a server: a cancel that overtakes its job.


class Server:
    """JetStream and the records, which a test lets something happen in before they answer."""

    def __init__(self) -> None:
        self.queue: LeaderJobQueue
        self.cancels = False

    async def publish(self, subject: str, data: bytes, headers: object) -> Any:
        if self.cancels:
            self.queue.cancel(CancelRows(job_id=JOB.job_id, attempt=0))
        metadata = SimpleNamespace(sequence=SimpleNamespace(stream=1))
        await self.queue._take(cast("Msg", SimpleNamespace(data=data, reply="r", metadata=metadata)))
        return SimpleNamespace(duplicate=False)

    async def create(self, record: object) -> int:
        return 1


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_job_that_is_cancelled_before_it_is_delivered_ends_without_waiting_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    ended: list[tuple[str, bool]] = []

    async def carry(_: RouterContext, held: HeldJob) -> bool:
        ended.append((held.job.job_id, held.cancelled))
        return True

    monkeypatch.setattr(module, "carry", carry)
    server, placement = Server(), Placement()
    tools = SimpleNamespace(
        config=RouterConfig(instance="r"),
        bus=SimpleNamespace(client=None, jetstream=server),
        records=server,
        dispatch=SimpleNamespace(placement=placement),
        forecasting=FinishTimeEstimator(placement, FairQueue()),
        room=SimpleNamespace(take=lambda: None),
    )
    async with asyncio.TaskGroup() as walks:
        queue = server.queue = LeaderJobQueue(cast("RouterContext", tools), walks, Epoch(1, 1))
        server.cancels = cancels
        await queue.submit(SubmitRequest(job=JOB, remaining_ms=1000))
    assert ended == ([(JOB.job_id, True)] if cancels else [])
    state = queue.state()
    assert (state.jobs, state.full) == (0 if cancels else 1, False)
