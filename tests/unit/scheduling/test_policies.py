"""Which worker gets a job, by each policy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import StepCosts
from giornata.residency.use_based import home_of
from giornata.scheduling.demand import (
    FinishEstimator,
    JobDemand,
    RowLoad,
    RowShape,
    StepTimeModel,
    WorkerLoad,
)
from giornata.scheduling.policies import CandidateWorker, deadline_aware, finish_time
from giornata.wire.workers import Tier
from giornata_lab.simulation.baselines import (
    POLICIES,
    SimPolicy,
    mask_aware,
    request_level,
    round_robin,
    step_aware,
    token_level,
)
from tests.examples import examples

SHAPE = RowShape(text=0, image=100, computed=10, steps=10)
DEMAND = JobDemand("m", "d", (SHAPE,), template="t")
PACE = StepTimeModel(StepCosts((1.0, 0.0, 0.1, 0.0, 0.0, 0.0)))


def candidate(
    name: str,
    *rows: RowLoad,
    places: int = 4,
    pace: StepTimeModel = PACE,
    template: Tier | None = None,
    demand: JobDemand = DEMAND,
    tokens: int = 0,
    fetch_ms: float = 0.0,
) -> CandidateWorker:
    hit, miss = (demand.loads(pace, reuses=reuses) for reuses in (True, False))
    return CandidateWorker(
        instance=name,
        capacity_rows=places,
        rows=len(rows),
        tokens=tokens,
        outlook=FinishEstimator(
            WorkerLoad(places, pace.base_ms, running=rows[:places], waiting=rows[places:])
        ),
        loads=miss if template is None else hit,
        template=template,
        hit_saves_ms=sum(load.work_ms for load in miss) - sum(load.work_ms for load in hit),
        fetch_ms=fetch_ms,
    )


def name(chosen: CandidateWorker | None) -> str | None:
    return chosen.instance if chosen else None


LONG, SHORT = RowLoad(steps=50, step_ms=5.0), RowLoad(steps=2, step_ms=5.0)


def test_round_robin_takes_turns_among_those_with_room() -> None:
    fleet = [candidate("b"), candidate("a"), candidate("c", *[LONG] * 4)]
    chosen = [name(round_robin(fleet, JobDemand("m", "d", (SHAPE,), ticket=i))) for i in range(4)]
    assert chosen == ["a", "b", "a", "b"]


def test_counts_mislead_where_finish_times_do_not() -> None:
    fleet = [
        candidate("long", LONG, template=Tier.MEMORY, tokens=100),
        candidate("short", SHORT, SHORT, template=Tier.MEMORY, tokens=200),
    ]
    assert name(request_level(fleet, DEMAND)) == "long"
    assert name(token_level(fleet, DEMAND)) == "long"
    assert name(finish_time(fleet, DEMAND)) == "short"


def test_a_mask_aware_choice_counts_what_is_computed_and_not_for_how_long() -> None:
    light, heavy = RowLoad(steps=50, step_ms=1.0), RowLoad(steps=1, step_ms=20.0)
    fleet = [candidate("heavy", heavy), candidate("light", light, light)]
    assert name(mask_aware(fleet, DEMAND)) == "light"


def test_a_step_aware_choice_counts_for_how_long_all_rows_are_computed() -> None:
    light, heavy = RowLoad(steps=50, step_ms=1.0), RowLoad(steps=1, step_ms=20.0)
    fleet = [candidate("light", light, light), candidate("heavy", heavy)]
    assert name(step_aware(fleet, DEMAND)) == "heavy"


def test_an_edit_goes_where_its_template_is_unless_the_queue_there_is_longer() -> None:
    cold, warm = candidate("cold"), candidate("warm", SHORT, template=Tier.MEMORY)
    assert name(finish_time([cold, warm], DEMAND)) == "warm"
    crowded = candidate("warm", *[LONG] * 3, template=Tier.MEMORY)
    assert name(finish_time([cold, crowded], DEMAND)) == "cold"
    slow_disk = candidate("warm", template=Tier.DISK, fetch_ms=1e6)
    assert name(finish_time([cold, slow_disk], DEMAND)) == "cold"


def test_a_template_that_nobody_has_goes_to_its_home_and_not_to_a_crowded_one() -> None:
    names = ["a", "b", "c"]
    owner = home_of(names, "t")
    other = next(n for n in names if n != owner)
    fleet = [candidate(n, SHORT) if n == owner else candidate(n) for n in names]
    assert name(finish_time(fleet, DEMAND)) == owner
    crowded = [candidate(n, *[LONG] * 3) if n == owner else candidate(n) for n in names]
    assert name(finish_time(crowded, DEMAND)) != owner
    assert home_of([n for n in names if n != other], "t") == owner, "it moves only with its own worker"


def test_waiting_for_a_fast_worker_beats_beginning_on_a_slow_one() -> None:
    slow = StepTimeModel(PACE.costs, slowness=100.0)
    fleet = [candidate("fast", *[SHORT] * 4, template=Tier.MEMORY), candidate("slow", pace=slow)]
    assert finish_time(fleet, DEMAND) is None
    assert name(request_level(fleet, DEMAND)) == "slow"


def test_a_deadline_takes_the_worker_that_delays_others_least() -> None:
    fleet = [candidate("idle", template=Tier.MEMORY), candidate("busy", LONG, template=Tier.MEMORY)]
    urgent = JobDemand("m", "d", (SHAPE,), template="t", within_ms=1e6)
    assert name(deadline_aware(fleet, urgent)) == "idle"
    late = JobDemand("m", "d", (SHAPE,), template="t", within_ms=0.0)
    assert name(deadline_aware(fleet, late)) == name(finish_time(fleet, late))


rows = st.lists(st.builds(RowLoad, steps=st.integers(1, 50), step_ms=st.floats(0, 50)), max_size=6)


@examples(times=3)  # of all policies
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    data=st.lists(st.tuples(rows, st.integers(1, 8), st.sampled_from([None, *Tier])), max_size=6),
    count=st.integers(1, 10),
    alone=st.booleans(),
)
def test_whoever_is_chosen_has_room(
    policy: SimPolicy, data: list[tuple[list[RowLoad], int, Tier | None]], count: int, alone: bool
) -> None:
    demand = JobDemand("m", "d", (SHAPE,) * count, template="t", alone=alone)
    fleet = [
        candidate(f"w{i}", *loads, places=places, template=tier, demand=demand)
        for i, (loads, places, tier) in enumerate(data)
    ]
    chosen = POLICIES[policy](fleet, demand)
    able = [c for c in fleet if c.rows == 0 or (not alone and c.rows + count <= c.capacity_rows)]
    if chosen is not None:
        assert chosen in able
    elif policy not in {SimPolicy.FINISH_TIME, SimPolicy.DEADLINE_AWARE}:
        assert not able
