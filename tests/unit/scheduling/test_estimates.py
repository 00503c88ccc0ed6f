"""Step times learnt from telemetry, and what is known again after one fresh message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S, Fleet
from giornata.planning.cost_model import StepParallelism
from giornata.planning.operations import StepCosts, StepWork
from giornata.scheduling.cost_models import SLOWEST, TEACHERS, WorkerCostModels, work_of
from giornata.scheduling.demand import UNIT, JobDemand, RowShape
from giornata.scheduling.placement import Placement
from giornata.scheduling.worker_state import Attempt, WorkerTotals
from giornata.wire.values import BlockMode
from giornata.wire.workers import (
    DegreeCosts,
    LoadSample,
    ServiceState,
    StepSample,
    Tier,
    WorkerCosts,
    WorkerState,
)
from giornata_lab.bench.systems.networks import plain
from tests.examples import examples
from tests.fakes.fleet import worker_costs
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, choose, row, worker

BLOCKS = 10
TRUE = (4.0, 0.0, 0.02, 1e-6, 0.0, 0.0)


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - a workload


def costs(weights: tuple[float, ...] = TRUE, device: str = "gpu") -> WorkerCosts:
    return worker_costs(*weights, device=device, load=(0.1, 1e-6), r2=0.9)


def shown(
    told: WorkerCosts | None, samples: Sequence[StepSample] = (), loads: Sequence[LoadSample] = ()
) -> WorkerState:
    return WorkerState(
        capacity_rows=8,
        capacity_tokens=4096,
        blocks=plain(BLOCKS),
        cost_model=told,
        samples=tuple(samples),
        loads=tuple(loads),
    )


def sample(
    rng: Random, weights: tuple[float, ...], *, slowness: float = 1.0, waited_ms: float = 0.0
) -> StepSample:
    rows = rng.randint(1, 8)
    computed = sum(rng.randint(50, 500) for _ in range(rows))
    pairs = computed * 600
    work = StepWork(1, rows, BLOCKS * (computed + 64 * rows), BLOCKS * pairs)
    ms = slowness * StepCosts(weights).step_ms(work)
    return StepSample(
        rows=rows,
        sequences=rows,
        image_tokens=computed,
        text_tokens=64 * rows,
        attention_pairs=pairs,
        linear=work.linear,
        attention=work.attention,
        assemble_ms=0.1,
        step_ms=ms + waited_ms,
        waited_ms=waited_ms,
    )


def predicted(estimates: WorkerCostModels, instance: str, one: StepSample) -> float:
    pace = estimates.pace(instance)
    return pace.slowness * pace.costs.step_ms(work_of(one))


def test_whether_a_worker_keeps_padding_is_part_of_its_pace() -> None:
    estimates = WorkerCostModels()
    for keeps in (False, True):
        told = costs().model_copy(update={"keeps_padding": keeps})
        estimates.observe(f"keeps {keeps}", "m", shown(told))
    assert [estimates.pace(f"keeps {keeps}").keeps_padding for keeps in (False, True)] == [False, True]


def test_a_slow_host_is_known_for_it_and_a_new_worker_is_predicted_at_once() -> None:
    rng, estimates = seeded(2), WorkerCostModels()
    for _ in range(60):
        estimates.observe("fast", "m", shown(costs(), [sample(rng, TRUE) for _ in range(4)]))
        estimates.observe("slow", "m", shown(costs(), [sample(rng, TRUE, slowness=2.0) for _ in range(4)]))
    estimates.observe("new", "m", shown(costs()))
    one = sample(rng, TRUE)
    slow, fast = (predicted(estimates, name, one) for name in ("slow", "fast"))
    assert slow / fast == pytest.approx(2.0, rel=0.1)
    assert slow == pytest.approx(2 * one.step_ms, rel=0.15)
    assert fast <= predicted(estimates, "new", one) <= slow, "as its kind is"


def test_steps_that_waited_for_loads_say_nothing_about_computing() -> None:
    rng, estimates = seeded(3), WorkerCostModels()
    for _ in range(40):
        estimates.observe("d1", "m", shown(costs(), [sample(rng, TRUE, waited_ms=500.0)]))
    one = sample(rng, TRUE)
    assert predicted(estimates, "d1", one) == pytest.approx(one.step_ms)


def test_rows_that_take_from_templates_take_as_much_longer_as_planners_expect() -> None:
    rng, estimates = seeded(4), WorkerCostModels()
    estimates.observe("d1", "m", shown(costs()))
    shape = RowShape(text=64, image=1000, computed=200, steps=5, begun=True)
    before = {reuses: shape.load(estimates.pace("d1"), reuses=reuses) for reuses in (True, False)}

    def planned(excess: float) -> StepSample:
        one = sample(rng, TRUE)
        return one.model_copy(update={"reusing_ms": one.step_ms / 2, "excess_ms": excess * one.step_ms / 2})

    for _ in range(60):
        estimates.observe("d1", "m", shown(costs(), [planned(0.5), sample(rng, TRUE)]))
    pace = estimates.pace("d1")
    assert pace.loading == pytest.approx(1.5), "steps in which nobody reuses say nothing"
    assert shape.load(pace, reuses=True).step_ms == pytest.approx(1.5 * before[True].step_ms, rel=0.02)
    assert shape.load(pace, reuses=False).step_ms == pytest.approx(before[False].step_ms, rel=0.02)
    hopeless = replace(pace, loading=100.0)
    assert shape.load(hopeless, reuses=True) == shape.load(pace, reuses=False), "then it computes in full"
    for _ in range(60):
        estimates.observe("d1", "m", shown(costs(), [planned(0.0)]))
    assert estimates.pace("d1").loading == pytest.approx(1.0, abs=0.01)


def test_devices_and_models_are_apart_and_who_tells_nothing_is_compared_by_tokens() -> None:
    estimates = WorkerCostModels()
    estimates.observe("a", "m", shown(costs(device="gpu")))
    estimates.observe("b", "m", shown(costs((*TRUE[:2], 1.0, 1.0, 0.0, 0.0), device="cpu")))
    estimates.observe("c", "m", shown(None))
    assert estimates.pace("a").costs.compute == StepCosts(TRUE).compute
    assert estimates.pace("b").costs.compute[2] == 1.0
    assert estimates.pace("c").costs.compute == UNIT.compute
    assert {(k.model_digest, k.device) for k in estimates.kinds()} == {("m", "gpu"), ("m", "cpu")}
    estimates.forget("a")
    assert estimates.pace("a") is estimates.pace("c")


def test_reading_from_disk_is_learnt_by_its_bytes() -> None:
    estimates = WorkerCostModels()
    assert estimates.fetch_ms("d1", 1e6) == 0.0
    read = LoadSample(tier=Tier.DISK, size_bytes=1_000_000, load_ms=10.0)
    estimates.observe("d1", "m", shown(costs(), loads=[read, read]))
    assert estimates.fetch_ms("d1", 2e6) == pytest.approx(20.0)


def test_workers_of_one_kind_that_reuse_in_other_ways_have_paces_of_their_own() -> None:
    estimates = WorkerCostModels()
    for name, mode in (("d1", BlockMode.KV), ("d2", BlockMode.HIDDEN), ("d3", BlockMode.KV)):
        estimates.observe(name, "m", shown(costs().model_copy(update={"reused": mode})))
    assert [estimates.pace(name).reused for name in ("d1", "d2", "d3")] == [
        BlockMode.KV,
        BlockMode.HIDDEN,
        BlockMode.KV,
    ]
    assert estimates.pace("d1") is estimates.pace("d3")


def test_many_workers_teach_a_regression_as_many_steps_as_a_few() -> None:
    def taught(workers: int) -> int:
        rng, estimates = seeded(5), WorkerCostModels()
        for _ in range(2):
            for number in range(workers):
                estimates.observe(f"d{number}", "m", shown(costs(), [sample(rng, TRUE) for _ in range(4)]))
        for number in range(TEACHERS, workers):
            estimates.forget(f"d{number}")
        before = learnt(estimates)
        for _ in range(8):
            for number in range(TEACHERS):
                estimates.observe(f"d{number}", "m", shown(costs(), [sample(rng, TRUE)]))
        assert learnt(estimates) == before + 8 * TEACHERS, "workers that are gone do not count"
        return before

    assert taught(TEACHERS) == 8 * TEACHERS
    assert taught(10 * TEACHERS) <= 2 * 8 * TEACHERS


def learnt(estimates: WorkerCostModels) -> int:
    """Steps that the only regression has taken in until its last refit."""
    [kind] = estimates.kinds()
    return kind.compute.samples + kind.compute.outliers


def test_a_worker_is_known_by_the_blocks_that_another_one_of_its_model_has_told() -> None:
    estimates = WorkerCostModels()
    silent = shown(costs()).model_copy(update={"blocks": None})
    estimates.observe("a", "m", silent)
    assert estimates.pace("a").costs is UNIT
    estimates.observe("b", "m", shown(costs()))
    estimates.observe("a", "m", silent)
    assert estimates.pace("a") is estimates.pace("b")
    estimates.observe("a", "other", silent)
    assert estimates.pace("a").operations is estimates.pace("b").operations, (
        "as it was before it told of another"
    )


def test_what_a_network_computes_follows_from_the_blocks_that_are_told() -> None:
    """The same weights, and a network of twice the operations."""
    estimates, shape = WorkerCostModels(), RowShape(text=64, image=1000, computed=200, steps=5)
    estimates.observe("a", "m", shown(costs()))
    estimates.observe("b", "twice", shown(costs()).model_copy(update={"blocks": plain(2 * BLOCKS)}))
    once, twice = (estimates.pace(name).row_ms(shape, BlockMode.KV) for name in ("a", "b"))
    assert once == pytest.approx(BLOCKS * (264 * TRUE[2] + 264 * 1064 * TRUE[3]))
    assert twice == pytest.approx(2 * once)


WIDE = tuple(0.6 * weight for weight in TRUE)


def pool_costs(*degrees: int) -> WorkerCosts:
    """What a pool tells that does not know yet how slow its wide steps are."""
    told = costs()
    wide = tuple(DegreeCosts(degree=degree, compute=costs(WIDE).compute) for degree in degrees)
    return told.model_copy(update={"degrees": wide})


def test_a_pool_has_the_degrees_that_it_tells_and_an_older_worker_none() -> None:
    estimates = WorkerCostModels()
    estimates.observe("old", "m", shown(costs()))
    estimates.observe("two", "m", shown(pool_costs(2)))
    estimates.observe("eight", "m", shown(pool_costs(2, 4, 8)))
    found = {name: [way for way, _ in estimates.pace(name).ways] for name in ("old", "two", "eight")}
    assert found == {
        "old": [],
        "two": [StepParallelism(2)],
        "eight": [StepParallelism(2), StepParallelism(4), StepParallelism(8)],
    }
    assert estimates.pace("old").costs is estimates.pace("eight").costs


# Telemetry that is lost, doubled or late: what is known is the same again after one fresh message of each
# worker.


WORKERS = ("d0", "d1", "d2")
CAPACITY = 3
STEPS = 10


@dataclass(frozen=True)
class TelemetryDelivery:
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
        st.builds(
            TelemetryDelivery,
            worker=st.sampled_from(WORKERS),
            copies=st.integers(0, 2),
            later=st.integers(0, 6),
        ),
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

    def happens(self, event: TelemetryDelivery | JobAssigned | Ended) -> None:
        self.now += 0.01
        if isinstance(event, TelemetryDelivery):
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
    happening: list[TelemetryDelivery | JobAssigned | Ended],
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
