"""Telemetry that is lost, doubled or late: what is known is the same again after one fresh message of each worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S, Fleet
from giornata.scheduling.cost_models import SLOWEST, WorkerCostModels
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.worker_state import Attempt, WorkerTotals
from giornata.wire.workers import ServiceState
from tests.examples import examples
from tests.unit.scheduling.test_estimates import TRUE, costs, predicted, sample, seeded, shown
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, choose, row, worker

WORKERS = ("d0", "d1", "d2")
CAPACITY = 3
STEPS = 10


@dataclass(frozen=True)
class Told:
    """One message, and what becomes of it on its way."""

    worker: str
    copies: int
    """0: it is lost."""
    later: int
    """Events that overtake it."""


@dataclass(frozen=True)
class JobAssigned:
    """A job gets a worker, be it for the first time, anew, or again after one had doubts about it."""

    job: str
    worker: str
    rows: int
    again: bool


@dataclass(frozen=True)
class Ended:
    """The oldest attempt at a job is reported."""

    job: str


jobs = st.integers(0, 5).map(lambda number: f"j{number}")
events = st.lists(
    st.one_of(
        st.builds(Told, worker=st.sampled_from(WORKERS), copies=st.integers(0, 2), later=st.integers(0, 6)),
        st.builds(
            JobAssigned,
            job=jobs,
            worker=st.sampled_from(WORKERS),
            rows=st.integers(1, 2),
            again=st.booleans(),
        ),
        st.builds(Ended, job=jobs),
    ),
    max_size=40,
)


class World:
    """What is true, and what two routers know of it: one that hears everything at once, and one that does not."""

    def __init__(self) -> None:
        self.clear, self.disturbed = Placement(), Placement()
        self.held: dict[Attempt, tuple[str, JobDemand]] = {}
        """By job and attempt: worker and demand. A job may have several at a time."""
        self.attempts: dict[str, int] = {}
        self.now = 0.0
        self._under_way: list[tuple[int, ServiceState]] = []
        for name in WORKERS:
            self.hear(self.state(name))

    def hear(self, state: ServiceState) -> None:
        for known in (self.clear, self.disturbed):
            known.observe(state, self.now)

    def state(self, name: str) -> ServiceState:
        rows = [
            row(job, 0, STEPS, attempt=attempt).model_copy(update={"index": index})
            for (job, attempt), (where, demand) in self.held.items()
            if where == name
            for index in range(demand.rows)
        ]
        return worker(name, *rows, capacity=CAPACITY)

    def happens(self, event: Told | JobAssigned | Ended) -> None:
        self.now += 0.01
        if isinstance(event, Told):
            state = self.state(event.worker)
            self.clear.observe(state, self.now)
            self._under_way += [(event.later, state)] * event.copies
        elif isinstance(event, JobAssigned):
            self._give(event)
        else:
            ended = min((key for key in self.held if key[0] == event.job), default=(event.job, 1))
            self.held.pop(ended, None)
            for known in (self.clear, self.disturbed):
                known.release(*ended)
        due = [state for later, state in self._under_way if later == 0]
        self._under_way = [(later - 1, state) for later, state in self._under_way if later]
        for state in due:
            self.disturbed.observe(state, self.now)

    def _give(self, event: JobAssigned) -> None:
        attempt = self.attempts.get(event.job, 0)
        before = self.held.get((event.job, attempt))
        if before is not None and event.again:  # whoever waited for it looks at its record, and waits on
            name, demand = before
            for known in (self.clear, self.disturbed):
                known.release(event.job, attempt)
        else:
            attempt, name = attempt + 1, event.worker
            demand = replace(DEMAND, shapes=(SHAPE,) * event.rows)
        self.attempts[event.job] = attempt
        self.held[event.job, attempt] = name, demand
        for known in (self.clear, self.disturbed):
            known.assign(event.job, attempt, name, demand, self.now)

    def counted(self, known: Placement) -> dict[str, WorkerTotals]:
        return {name: known.totals(name) for name in WORKERS}

    def check(self) -> None:
        """Whatever was heard, nothing counts more than once, and what was given is known."""
        for name, held in self.counted(self.disturbed).items():
            assert held.rows == len(held.owners)
            assert held.tokens == held.rows * SHAPE.image
            assert held.work_ms == pytest.approx(held.rows * STEPS * SHAPE.image)
            for job in set(held.owners):
                here = [d for (of, _), (where, d) in self.held.items() if (of, where) == (job, name)]
                assert 0 < held.owners.count(job) <= sum(demand.rows for demand in here), (
                    "no more than is there"
                )
        for job in self.attempts:
            assigned = {a.key: (a.worker, a.demand) for a in self.disturbed.assigned(job)}
            assert assigned == {key: held for key, held in self.held.items() if key[0] == job}
        assert all(self.disturbed.worker(key) == where for key, (where, _) in self.held.items())


@given(happening=events)
def test_placement_is_the_same_after_one_fresh_message_of_each_worker(
    happening: list[Told | JobAssigned | Ended],
) -> None:
    world = World()
    for event in happening:
        world.happens(event)
        world.check()
    for name in WORKERS:
        world.hear(world.state(name))
    world.check()
    counted, expected = world.counted(world.disturbed), world.counted(world.clear)
    for name in WORKERS:
        assert sorted(counted[name].owners) == sorted(expected[name].owners)
        assert counted[name].work_ms == pytest.approx(expected[name].work_ms)
    assert {job for held in counted.values() for job in held.owners} == {job for job, _ in world.held}
    for demand in (DEMAND, replace(DEMAND, shapes=(SHAPE,) * 2), replace(DEMAND, alone=True)):
        assert world.disturbed.has_room(demand) is world.clear.has_room(demand)
        assert choose(world.disturbed, demand) == choose(world.clear, demand)
    assert world.disturbed.unlisted() == world.clear.unlisted() == []
    world.now += SILENCE_S + 1
    lost = [{a.key for a in known.expire(world.now)} for known in (world.clear, world.disturbed)]
    assert lost == [world.held.keys()] * 2


@st.composite
def on_the_way(draw: st.DrawFn, most: int = 12) -> tuple[list[int], list[int]]:
    """Numbers of messages as they were sent, and as they arrive."""
    sent = list(range(draw(st.integers(0, most))))
    arriving = [number for number in sent for _ in range(draw(st.integers(0, 2)))]
    return sent, draw(st.permutations(arriving))


@given(way=on_the_way(), names=st.lists(st.sampled_from(WORKERS), min_size=12, max_size=12))
def test_the_fleet_is_the_same_after_one_fresh_message_of_each(
    way: tuple[list[int], list[int]], names: list[str]
) -> None:
    sent, arriving = way
    states = [worker(name, row("j", step, STEPS), draining=step % 2 == 0) for step, name in enumerate(names)]
    clear, disturbed = Fleet(), Fleet()
    for known, order in ((clear, sent), (disturbed, arriving)):
        for number in order:
            known.observe(states[number], number / 10)
        for name in WORKERS:
            known.observe(worker(name), 2.0)
    assert clear.all() == disturbed.all()
    assert [state.instance for state in disturbed.expire(2.0 + SILENCE_S + 0.1)] != []
    assert disturbed.all() == disturbed.expire(1e6) == []


@examples(times=0.4)  # each takes in hundreds of steps
@given(
    way=on_the_way(), slow=st.lists(st.floats(0.2, 6.0), min_size=12, max_size=12), seed=st.integers(0, 99)
)
def test_what_steps_cost_is_learnt_again_from_fresh_steps(
    way: tuple[list[int], list[int]], slow: list[float], seed: int
) -> None:
    sent, arriving = way
    rng = seeded(seed)
    batches = [[sample(rng, TRUE, slowness=slowness) for _ in range(4)] for slowness in slow]
    fresh = [[sample(rng, TRUE) for _ in range(8)] for _ in range(40)]
    one = sample(rng, TRUE)
    for order in (sent, arriving):
        estimates = WorkerCostModels()
        estimates.observe("d1", "m", shown(costs()))
        for number in order:
            estimates.observe("d1", "m", shown(costs(), batches[number]))
            pace = estimates.pace("d1")
            assert 1 / SLOWEST <= pace.slowness <= SLOWEST
            assert all(math.isfinite(weight) and weight >= 0 for weight in pace.costs.compute)
        for batch in fresh:
            estimates.observe("d1", "m", shown(costs(), batch))
        assert predicted(estimates, "d1", one) == pytest.approx(one.step_ms, rel=0.1)
