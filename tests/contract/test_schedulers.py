"""Every scheduler keeps what the router and the simulator rely on, in any state of the line and the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement, StallTimeout
from giornata.scheduling.queue import FairQueue, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import Scheduler, SchedulingDecision
from giornata.scheduling.worker_state import Attempt
from giornata.wire.jobs import Priority
from giornata.wire.workers import RowProgress, ServiceName, ServiceState, WorkerState
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.options import RunOptions
from tests.fakes.fleet import CARD

NOW: Final = 100.0
SHAPE: Final = RowShape(text=4, image=16, computed=8, steps=10)
SCHEDULERS_SERVED: Final[Mapping[str, Scheduler]] = {
    str(name): RunOptions(name).scheduler() for name in SimPolicy
}
schedulers = pytest.mark.parametrize("scheduler", SCHEDULERS_SERVED.values(), ids=SCHEDULERS_SERVED)


@dataclass(frozen=True)
class FakeWorker:
    """One worker, and all that keeps it from taking rows."""

    capacity: int
    running: int
    draining: bool = False
    ready: bool = True
    stalled: bool = False
    refused: bool = False
    served: bool = True
    """Whether it has the model that is asked for."""

    @property
    def able(self) -> bool:
        return self.ready and self.served and not (self.draining or self.stalled or self.refused)


@dataclass(frozen=True)
class Wanted:
    """Rows of one job."""

    rows: int
    priority: Priority
    tenant: str
    since_s: float
    finish_by_s: float | None = None
    together: bool = False
    alone: bool = False
    template: str | None = None


rare = st.sampled_from([False, False, False, True])
mostly = st.sampled_from([True, True, True, False])
fleets = st.lists(
    st.builds(
        FakeWorker,
        capacity=st.integers(1, 4),
        running=st.integers(0, 4),
        draining=rare,
        ready=mostly,
        stalled=rare,
        refused=rare,
        served=mostly,
    ),
    max_size=5,
)
wanted = st.lists(
    st.builds(
        Wanted,
        rows=st.integers(1, 6),
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("abc"),
        since_s=st.floats(0, NOW),
        finish_by_s=st.none() | st.floats(0, 2 * NOW),
        together=rare,
        alone=rare,
        template=st.none() | st.sampled_from(["t0", "t1"]),
    ),
    max_size=6,
)


@dataclass
class Cell:
    """A fleet and a line as the router would see them, and what is applied to them."""

    fleet: Mapping[str, FakeWorker]
    line: RowQueue
    placement: Placement = field(default_factory=lambda: Placement(StallTimeout(factor=2.0, least_ms=100.0)))
    attempts: Counter[str] = field(default_factory=Counter)

    def hear(self, name: str, running: int) -> None:
        known = self.fleet[name]
        rows = [
            RowProgress(job_id=f"{name}-{index}", attempt=1, index=0, step=0, steps=9, tokens=16)
            for index in range(running)
        ]
        card = CARD if known.served else CARD.model_copy(update={"digest": "other"})
        state = WorkerState(
            capacity_rows=known.capacity,
            capacity_tokens=999,
            running=tuple(rows),
            stepping_ms=1e9 if known.stalled else 0.0,
        )
        told = ServiceState(
            service=ServiceName.DENOISER,
            instance=name,
            host="h",
            version="0",
            ready=known.ready,
            draining=known.draining,
            models=(card,),
            worker=state,
        )
        self.placement.observe(told, NOW)
        if known.refused:
            self.placement.refuse(name)

    def apply(self, decision: SchedulingDecision) -> list[Attempt]:
        made = []
        for (job_id, ticket), worker, rows, passes in decision.placements:
            self.attempts[job_id] += 1
            made.append((job_id, self.attempts[job_id]))
            demand = self.line.serve((job_id, ticket), rows, NOW, passes)
            assert demand.rows == len(rows)
            self.placement.assign(*made[-1], worker, demand, NOW)
        return made


def cell(fleet: list[FakeWorker], jobs: list[Wanted], *, by_deadline: bool) -> Cell:
    made = Cell({f"d{i}": one for i, one in enumerate(fleet)}, FairQueue(by_deadline=by_deadline))
    for name, one in made.fleet.items():
        made.hear(name, one.running)
    for number, job in enumerate(jobs):
        demand = JobDemand(
            CARD.name,
            CARD.digest,
            (SHAPE,) * job.rows,
            template=job.template,
            together=job.together,
            alone=job.alone,
        )
        claim = SchedulingParams(job.priority, job.tenant, finish_by_s=job.finish_by_s)
        rows = tuple(range(number, number + job.rows))
        made.line.join(f"j{number}", demand, claim, job.since_s, rows=rows)
    return made


@schedulers
@given(fleet=fleets, jobs=wanted, by_deadline=st.booleans())
def test_a_decision_is_one_that_workers_and_jobs_can_keep(
    scheduler: Scheduler, fleet: list[FakeWorker], jobs: list[Wanted], by_deadline: bool
) -> None:
    known = cell(fleet, jobs, by_deadline=by_deadline)
    order = known.line.order(NOW)
    entries = {entry.key: entry for entry in order}
    decision = scheduler.decide(known.line, known.placement, NOW)
    assert decision.wake_at is None or decision.wake_at > NOW
    given_rows = Counter[str]()
    guests: dict[str, set[str]] = {name: set() for name in known.fleet}
    seen: set[tuple[str, int]] = set()
    for placed in decision.placements:
        entry, worker = entries[placed.key], known.fleet[placed.worker]
        assert worker.able, (
            "no row goes to a worker that drains, is full of a step that does not end, or refused"
        )
        assert placed.rows
        rows = {(entry.job_id, row) for row in placed.rows}
        assert len(rows) == len(placed.rows)
        assert set(placed.rows) <= set(entry.rows)
        assert not rows & seen, "no row is placed twice"
        seen |= rows
        if entry.demand.together or entry.demand.alone:
            assert set(placed.rows) == set(entry.rows)
        if entry.demand.alone:
            assert not worker.running
            assert not guests[placed.worker], "it finds an empty worker"
        given_rows[placed.worker] += len(placed.rows)
        guests[placed.worker].add(entry.job_id)
        if placed.passes is not None:
            assert order.index(entries[placed.passes]) < order.index(entry)
    for name, rows_given in given_rows.items():
        one = known.fleet[name]
        whole = not one.running and len(guests[name]) == 1
        assert one.running + rows_given <= one.capacity or whole, (
            "only a job too large for every worker is more"
        )
    if jobs and known.fleet and all(one.able and not one.running for one in known.fleet.values()):
        assert decision.placements, "idle workers do not wait"


@schedulers
@given(fleet=fleets, jobs=wanted, by_deadline=st.booleans())
def test_deciding_changes_nothing(
    scheduler: Scheduler, fleet: list[FakeWorker], jobs: list[Wanted], by_deadline: bool
) -> None:
    known = cell(fleet, jobs, by_deadline=by_deadline)
    asked = JobDemand(CARD.name, CARD.digest, (SHAPE,), template="t0")

    def seen() -> tuple[object, ...]:
        candidates = known.placement.candidates(asked, 16)
        told = [(c._replace(outlook=None), c.outlook.backlog) for c in candidates]  # type: ignore[arg-type]  # compared by its backlog
        return known.line.order(NOW), told, known.placement.has_room(asked)

    before = seen()
    decision = scheduler.decide(known.line, known.placement, NOW)
    assert seen() == before
    assert scheduler.decide(known.line, known.placement, NOW) == decision


@schedulers
@given(fleet=fleets, jobs=wanted, by_deadline=st.booleans())
def test_applied_decisions_empty_the_line(
    scheduler: Scheduler, fleet: list[FakeWorker], jobs: list[Wanted], by_deadline: bool
) -> None:
    known = cell(fleet, jobs, by_deadline=by_deadline)
    able = [name for name, one in known.fleet.items() if one.able]
    for name in able:
        known.hear(name, running=0)
    for _ in range(sum(job.rows for job in jobs)):
        for attempt in known.apply(scheduler.decide(known.line, known.placement, NOW)):
            known.placement.release(*attempt)
    assert (len(known.line) == 0) is bool(able or not jobs)
