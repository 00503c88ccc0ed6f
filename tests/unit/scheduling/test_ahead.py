"""Loads that begin while rows wait, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import (
    KEPT,
    LANES,
    OVERDUE,
    STAYING,
    TOLD_S,
    LoraLoadTimes,
    NeededLora,
    PendingAdapterLoads,
    UnitTime,
)
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import finish_time
from giornata.scheduling.queue import LOOK_S, RELOOK_S, FairQueue, RowQueue, SchedulingParams, TenantJobOrder
from giornata.scheduling.scheduler import (
    AHEAD,
    AHEAD_S,
    PrefetchRequest,
    QueueOrderScheduler,
    SchedulingDecision,
    likely_worker,
)
from giornata.wire.workers import ServiceState, Tier
from giornata_lab.bench.systems.networks import plain
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.options import RunOptions
from tests.fakes.fleet import worker_costs
from tests.present import present
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, placement, row, telling, worker

MB: Final = 1_000_000
LORA: Final = NeededLora("a" * 64, 300 * MB)
OTHER: Final = NeededLora("b" * 64, 300 * MB)
ADAPTED: Final = replace(DEMAND, adapters=(LORA,))
OURS: Final = QueueOrderScheduler(finish_time)
COSTS: Final = worker_costs(1000.0)
"""A step takes a second, whatever rows it has."""


def busy(name: str, *left: int, held: Sequence[NeededLora] = (), capacity: int = 1) -> ServiceState:
    """A worker that computes rows with so many steps, of a second each."""
    rows = [row(f"{name}-{number}", 0, steps) for number, steps in enumerate(left)]
    resident = {Tier.DEVICE: tuple(lora.digest for lora in held)}
    state = worker(name, *rows, capacity=capacity)
    return telling(state, adapters_resident=resident, cost_model=COSTS, blocks=plain(4))


def line_of(*demands: JobDemand) -> FairQueue:
    line = FairQueue(turn=TenantJobOrder.ARRIVAL)
    for number, demand in enumerate(demands):
        line.join(f"j{number}", demand, SchedulingParams(), 0.0)
    return line


def decided(
    line: RowQueue, known: Placement, now: float, scheduler: QueueOrderScheduler = OURS
) -> SchedulingDecision:
    """Decide, and apply what was decided."""
    decision = scheduler.decide(line, known, now)
    for key, name, rows, passes in decision.placements:
        known.assign(key[0], 1, name, line.serve(key, rows, now, passes), now)
    for load in decision.loads:
        line.tell(load.key, load.worker)
        known.fetch(load.worker, load.demand, now)
    return decision


def told(decision: SchedulingDecision) -> list[tuple[str, str]]:
    return [(load.key[0], load.worker) for load in decision.loads]


def test_the_likely_worker_loads_while_the_job_waits_and_is_told_once() -> None:
    line, known = line_of(ADAPTED), placement(busy("a", 9), busy("b", 5))
    decision = decided(line, known, 0.0)
    (entry,) = line
    assert decision.loads == (PrefetchRequest(entry.key, "b", entry.demand),), "its turn comes there first"
    assert (decision.placements, decision.wake_at) == ((), LOOK_S)
    assert (entry.fetching, sorted(entry.told)) == ("b", ["b"])
    for now in (RELOOK_S, 2 * RELOOK_S, 3 * RELOOK_S):
        assert decided(line, known, now).loads == ()


def test_another_worker_is_told_once_it_is_the_likely_one() -> None:
    line, known = line_of(ADAPTED), placement(busy("a", 9), busy("b", 5))
    assert told(decided(line, known, 0.0)) == [("j0", "b")]
    known.observe(busy("a", 1), 1.0)
    known.observe(busy("b", 5), 1.0)
    assert told(decided(line, known, RELOOK_S)) == [("j0", "a")]
    known.observe(busy("a", 9), 2.0)
    assert decided(line, known, 2 * RELOOK_S).loads == (), "it was told before"


def test_a_load_begins_once_the_turn_is_near() -> None:
    line, known = line_of(ADAPTED), placement(busy("a", int(AHEAD_S) + 2))
    assert told(decided(line, known, 0.0)) == []
    known.observe(busy("a", int(AHEAD_S)), 2.0)
    assert told(decided(line, known, 2.0)) == [("j0", "a")]


def test_those_before_have_their_workers_first() -> None:
    """Each of ten steps: the third job's turn is after the first one's, beyond what is near."""
    asked = [replace(DEMAND, adapters=(NeededLora(f"{n:064x}", 300 * MB),)) for n in range(3)]
    line, known = line_of(*asked), placement(busy("a", 4), busy("b", 6))
    assert told(decided(line, known, 0.0)) == [("j0", "a"), ("j1", "b"), ("j2", "a")]
    line, known = line_of(DEMAND, DEMAND, DEMAND, *asked[:1]), placement(busy("a", 4), busy("b", 6))
    assert told(decided(line, known, 0.0)) == [], "16 seconds: jobs without adapters take places too"


def test_a_job_that_waits_for_the_holder_counts_there_for_later_ones() -> None:
    """Ten steps each; the holder is busy for two seconds. The second job would begin there after twelve."""
    large = NeededLora(LORA.digest, 1000 * MB)
    asked = replace(DEMAND, adapters=(large,))
    line, known = line_of(asked, asked), placement(busy("a", 2, held=[large]), busy("b"))
    decision = decided(line, known, 0.0)
    assert [(placed.key[0], placed.worker) for placed in decision.placements] == [("j1", "b")]
    assert decision.loads == (), "the first one's is there"
    assert decided(line, known, RELOOK_S).placements == (), "the first one waits on"
    known.observe(busy("a", held=[large]), 2.0)
    assert [placed.worker for placed in decided(line, known, 2.0).placements] == ["a"]


def test_what_is_there_or_on_its_way_is_not_loaded() -> None:
    line, known = line_of(ADAPTED, ADAPTED), placement(busy("a", 4, held=[OTHER]))
    assert told(decided(line, known, 0.0)) == [("j0", "a")], "the second one's is on its way then"
    line = line_of(replace(DEMAND, adapters=(OTHER,)))
    assert decided(line, known, 0.0).loads == ()


def test_only_the_first_in_line_are_looked_at() -> None:
    adapted = [replace(DEMAND, adapters=(NeededLora(f"{n:064x}", MB),)) for n in range(AHEAD + 4)]
    known = placement(*(busy(f"d{n}", 2, 2, capacity=2) for n in range(AHEAD)))
    loads = decided(line_of(*adapted), known, 0.0).loads
    assert {load.key[0] for load in loads} == {f"j{n}" for n in range(AHEAD)}


def test_a_worker_that_refuses_is_no_likely_one() -> None:
    line, known = line_of(ADAPTED), placement(busy("a", 9), busy("b", 5))
    known.refuse("b")
    assert told(decided(line, known, 0.0)) == [("j0", "a")]


def test_rows_that_get_a_worker_now_load_there_and_nowhere_else() -> None:
    line, known = line_of(ADAPTED), placement(busy("a", 9), busy("b"))
    decision = decided(line, known, 0.0)
    assert ([placed.worker for placed in decision.placements], decision.loads) == (["b"], ())


def test_rows_that_are_left_have_a_likely_worker_of_their_own() -> None:
    asked = replace(ADAPTED, shapes=(SHAPE, SHAPE))
    line, known = line_of(asked), placement(busy("a", 3), busy("b", held=[LORA]))
    decision = decided(line, known, 0.0)
    assert [placed.rows for placed in decision.placements] == [(0,)]
    (load,) = decision.loads
    assert (load.worker, load.demand.rows) == ("a", 1)


def test_a_line_is_looked_at_again_soon_after_it_changed_and_later_otherwise() -> None:
    line, known = line_of(DEMAND), placement(busy("a", 99))
    assert decided(line, known, 0.0).wake_at is None, "nobody needs adapters"
    line.join("late", ADAPTED, SchedulingParams(), 0.0)
    decided(line, known, 1.0)
    assert line.looks_at == 1.0 + RELOOK_S
    line.join("later", ADAPTED, SchedulingParams(), 1.0)
    assert line.looks_at == 1.0 + LOOK_S
    before = decided(line, known, 1.0 + LOOK_S / 2)
    assert (before.loads, before.wake_at) == ((), 1.0 + LOOK_S)
    for entry in list(line):
        if entry.demand.adapters:
            line.leave(entry.key)
    assert line.looks_at is None


@pytest.mark.parametrize("policy", sorted(SimPolicy))
def test_only_policies_that_know_what_loads_cost_begin_them_ahead(policy: SimPolicy) -> None:
    line, known = line_of(ADAPTED), placement(busy("a", 9), busy("b", 5))
    decision = RunOptions(policy).scheduler().decide(line, known, 0.0)
    ours = policy in {SimPolicy.FINISH_TIME, SimPolicy.DEADLINE_AWARE}
    assert (told(decision) == [("j0", "b")]) is ours
    assert (likely_worker(RunOptions(policy).scheduler(), known, ADAPTED, 0.0) == "b") is ours


def test_a_job_that_is_being_encoded_loads_where_it_should_begin() -> None:
    known = placement(busy("a", 8, held=[LORA]), busy("b", 8))
    assert likely_worker(OURS, known, ADAPTED, 0.0) is None, "a likely worker has it: nothing is to load"
    known.observe(busy("b", 5), 0.0)
    assert likely_worker(OURS, known, replace(DEMAND, adapters=(OTHER,)), 0.0) == "b"
    known.observe(busy("b"), 1.0)
    assert likely_worker(OURS, known, replace(DEMAND, adapters=(OTHER,)), 1.0) == "b"


fleets = st.lists(
    st.tuples(
        st.lists(st.integers(1, 20), max_size=3), st.integers(1, 3), st.sets(st.integers(0, 5)), st.booleans()
    ),
    min_size=1,
    max_size=4,
)
asks = st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 5), max_size=2)), max_size=8)


@given(rounds=st.lists(st.tuples(fleets, asks), min_size=1, max_size=4))
def test_nobody_is_told_twice_or_what_is_there_or_by_a_worker_that_refuses(
    rounds: list[tuple[list[tuple[list[int], int, set[int], bool]], list[tuple[int, set[int]]]]],
) -> None:
    loras = [NeededLora(f"{n:064x}", (n + 1) * 50 * MB) for n in range(6)]
    line, known, seen, number, now = FairQueue(), Placement(), set[tuple[object, str]](), 0, 0.0
    for fleet, asked in rounds:
        held: dict[str, set[str]] = {}
        refused = set()
        for index, (left, capacity, resident, refuses) in enumerate(fleet):
            name = f"d{index}"
            own = [loras[n] for n in sorted(resident)]
            held[name] = {lora.digest for lora in own}
            known.observe(busy(name, *left, held=own, capacity=capacity), now)
            if refuses:
                known.refuse(name)
                refused.add(name)
        for rows, needed in asked:
            adapters = tuple(loras[n] for n in sorted(needed))
            line.join(
                f"j{number}",
                replace(DEMAND, shapes=(SHAPE,) * rows, adapters=adapters),
                SchedulingParams(),
                now,
            )
            number += 1
        waiting = {entry.key: entry for entry in line}
        decision = decided(line, known, now)
        assert decision.wake_at is None or decision.wake_at > now
        for key, name, demand in decision.loads:
            assert (key, name) not in seen
            assert name not in refused
            assert key in {entry.key for entry in line}, "it waits still"
            assert demand.adapters == waiting[key].demand.adapters
            assert not {lora.digest for lora in demand.adapters} <= held.get(name, set())
            seen.add((key, name))
        now += RELOOK_S


# When LoRAs that a worker was told to load arrive, and time that grows with an amount.


ARRIVALS = LoraLoadTimes()
SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=8)


def loras(megabytes: list[int]) -> list[NeededLora]:
    return [NeededLora(str(number), size * MB) for number, size in enumerate(megabytes)]


def seconds(lora: NeededLora) -> float:
    return ARRIVALS.ms(lora.size_bytes, None) / 1e3


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 4), st.floats(0, 3))
def test_each_job_loads_in_the_lane_that_is_free_first_one_after_the_other(
    jobs: list[list[int]], lanes: int, passed_s: float
) -> None:
    incoming, free = PendingAdapterLoads(lanes), [0.0] * lanes
    for job, megabytes in enumerate(jobs):
        known = [NeededLora(f"{job} {lora.digest}", lora.size_bytes) for lora in loras(megabytes)]
        incoming.bring(known, {}, ARRIVALS, 0.0)
        free.sort()
        for lora in known:
            free[0] += seconds(lora)
            left_ms = incoming.left_ms(lora.digest, passed_s)
            assert left_ms == pytest.approx(max(0.0, free[0] - passed_s) * 1e3)
    assert incoming.queue_ms(passed_s) == pytest.approx(max(0.0, min(free) - passed_s) * 1e3)


@pytest.mark.parametrize("tier", list(Tier))
def test_what_is_on_the_device_or_on_its_way_is_not_loaded_again(tier: Tier) -> None:
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {lora.digest: tier}, ARRIVALS, 0.0)
    coming = incoming.left_ms(lora.digest, 0.0)
    if tier is Tier.DEVICE:
        assert coming is None
        return
    assert coming == pytest.approx(ARRIVALS.ms(lora.size_bytes, tier))
    incoming.bring([lora], {lora.digest: tier}, ARRIVALS, 0.0)
    assert incoming.left_ms(lora.digest, 0.0) == coming


@given(SIZES, st.floats(0, 1), st.integers(1, 3))
def test_loads_that_telemetry_tells_to_be_over_let_later_ones_begin(
    megabytes: list[int], share: float, lanes: int
) -> None:
    """The first one arrives sooner than expected: no later one is expected later than before."""
    told, known = PendingAdapterLoads(lanes), loras(megabytes)
    for lora in known:
        told.bring([lora], {}, ARRIVALS, 0.0)
    now = share * seconds(known[0])
    before = {lora.digest: told.left_ms(lora.digest, now) for lora in known}
    told.settle({known[0].digest: Tier.DEVICE}, now)
    assert told.left_ms(known[0].digest, now) is None
    for lora in known[1:]:
        left, earlier = present(told.left_ms(lora.digest, now)), present(before[lora.digest])
        assert left <= earlier + 1e-6
    if len(known) < lanes + 1:
        assert told.queue_ms(now) == 0


def test_what_stays_in_memory_is_on_its_way_no_more() -> None:
    """The device has no room for it, as long as nobody waits for it."""
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {lora.digest: Tier.MEMORY}, ARRIVALS, 0.0)
    takes_s = ARRIVALS.ms(lora.size_bytes, Tier.MEMORY) / 1e3
    incoming.settle({lora.digest: Tier.MEMORY}, STAYING * takes_s * 0.99)
    assert incoming.left_ms(lora.digest, STAYING * takes_s) == 0
    incoming.settle({lora.digest: Tier.MEMORY}, STAYING * takes_s * 1.01)
    assert incoming.left_ms(lora.digest, STAYING * takes_s) is None


def test_a_load_that_takes_far_too_long_is_counted_no_more() -> None:
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {}, ARRIVALS, 0.0)
    late_s = OVERDUE * seconds(lora) + TOLD_S
    incoming.settle({}, late_s * 0.99)
    assert incoming.left_ms(lora.digest, late_s) == 0
    incoming.settle({}, late_s * 1.01)
    assert incoming.left_ms(lora.digest, late_s) is None


def test_a_copy_goes_its_own_way() -> None:
    one, other = loras([100, 200])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([one], {}, ARRIVALS, 0.0)
    copied = incoming.copy()
    copied.bring([other], {}, ARRIVALS, 0.0)
    assert incoming.left_ms(other.digest, 0.0) is None
    assert incoming.queue_ms(0.0) == 0 < copied.queue_ms(0.0)


AMOUNTS = st.floats(1, 1e6)
TIMES = st.floats(0.001, 1e6)


def test_nothing_is_known_before_anything_was_observed() -> None:
    assert UnitTime().ms(100) == 0.0


@given(st.lists(st.tuples(AMOUNTS, TIMES), min_size=1, max_size=20), AMOUNTS)
def test_a_rate_lies_between_those_observed_and_is_linear(
    seen: list[tuple[float, float]], asked: float
) -> None:
    rate = UnitTime()
    for amount, ms in seen:
        rate.observe(amount, ms)
    ratios = [ms / amount for amount, ms in seen]
    assert min(ratios) * (1 - 1e-9) <= rate.ms(asked) / asked <= max(ratios) * (1 + 1e-9)
    assert rate.ms(2 * asked) == pytest.approx(2 * rate.ms(asked))


def test_what_changed_is_known_soon() -> None:
    rate = UnitTime()
    for _ in range(100):
        rate.observe(10, 10)
    for _ in range(22):  # a tenth of what was known is left
        rate.observe(10, 100)
    assert KEPT**22 < 0.1
    assert rate.ms(1) > 9
