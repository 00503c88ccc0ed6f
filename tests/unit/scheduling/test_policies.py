"""Which worker gets a job, by each policy, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import StepCosts
from giornata.residency.use_based import home_of
from giornata.scheduling.adapters import NeededControl
from giornata.scheduling.demand import (
    FinishEstimator,
    JobDemand,
    RowLoad,
    RowShape,
    StepTimeModel,
    WorkerLoad,
)
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import CandidateWorker, Policy, deadline_aware, finish_time, with_room
from giornata.scheduling.queue import AGEING_S, FairQueue, SchedulingParams
from giornata.scheduling.scheduler import (
    MAX_CHOOSY,
    MAX_PASSED,
    QueueOrderScheduler,
    RowAssignment,
    SchedulingDecision,
)
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.jobs import Priority
from giornata.wire.workers import RowProgress, Tier, WorkerState
from giornata_lab.simulation.baselines import (
    POLICIES,
    SimPolicy,
    mask_aware,
    request_level,
    round_robin,
    step_aware,
    token_level,
)
from giornata_lab.simulation.jobs import DIGEST, MODEL
from giornata_lab.simulation.simulator import TOLD
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


# Whose turn it is: a job that waits for a better worker holds up no other, one without room is not
# starved.


ONE_ROW = JobDemand(MODEL, DIGEST, (RowShape(0, 16, 16, 10),))


class Cell:
    """Workers w0, w1 ... with two places and so many rows each, a line, and a scheduler whose decisions are applied."""

    def __init__(self, policy: Policy, rows: Sequence[int], *, spreads: bool = True) -> None:
        self.scheduler = QueueOrderScheduler(policy, spreads=spreads)
        self.placement, self.line = Placement(), FairQueue()
        for number, count in enumerate(rows):
            self.tell(number, count)

    def tell(self, number: int, rows: int, *nets: ControlCard) -> None:
        running = tuple(
            RowProgress(job_id=f"r{number}", attempt=1, index=index, step=0, steps=10, tokens=16)
            for index in range(rows)
        )
        worker = WorkerState(capacity_rows=2, capacity_tokens=999, running=running)
        told = {"instance": f"w{number}", "worker": worker, "controlnets": nets}
        self.placement.observe(TOLD.model_copy(update=told), 0.0)

    def join(
        self,
        job_id: str,
        demand: JobDemand = ONE_ROW,
        priority: Priority = Priority.INTERACTIVE,
        tenant: str = "t",
    ) -> None:
        self.line.join(job_id, demand, SchedulingParams(priority, tenant), 0.0)

    def decide(self, now: float = 0.0) -> SchedulingDecision:
        """Each placement becomes the first attempt of its job at its worker."""
        decision = self.scheduler.decide(self.line, self.placement, now)
        for (job_id, ticket), worker, rows, passes in decision.placements:
            demand = self.line.serve((job_id, ticket), rows, now, passes)
            self.placement.assign(job_id, int(worker[1:]), worker, demand, now)
        return decision

    def served(self) -> list[tuple[str, str, int]]:
        return [(placed.key[0], placed.worker, len(placed.rows)) for placed in self.decide().placements]


def only(instance: str, job: int) -> Policy:
    """The job of this ticket waits for `instance`; others take the first that has room."""

    def policy(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
        able = with_room(candidates, demand)
        return next((c for c in able if demand.ticket != job or c.instance == instance), None)

    return policy


def test_a_job_that_waits_for_a_better_worker_holds_up_nobody() -> None:
    cell = Cell(only("w0", 0), [2, 0])
    for name in ("choosy", "a", "b"):
        cell.join(name)
    assert cell.served() == [("a", "w1", 1), ("b", "w1", 1)]
    cell.tell(0, rows=1)
    assert cell.served() == [("choosy", "w0", 1)], "and is asked first when that one has room"


def test_a_job_that_waits_for_the_worker_with_its_controlnet_holds_up_nobody() -> None:
    edges = ControlCard(name="edges", digest="e" * 64, kind=ControlKind.FLUX, text_channels=8)
    cell = Cell(request_level, [2, 0])
    cell.tell(0, 2, edges)
    cell.join("edges", replace(ONE_ROW, controls=(NeededControl(edges.digest, 1.0),)))
    for name in ("a", "b"):
        cell.join(name)
    assert cell.served() == [("a", "w1", 1), ("b", "w1", 1)]
    cell.tell(0, 1, edges)
    assert cell.served() == [("edges", "w0", 1)]
    cell.join("depth", replace(ONE_ROW, controls=(NeededControl("d" * 64, 1.0),)))
    cell.tell(0, 0, edges)
    assert [name for name, *_ in cell.served()] == ["depth"], (
        "no worker has it: one refuses it, and it does not wait"
    )


def test_in_order_as_long_as_there_is_room() -> None:
    cell = Cell(request_level, [1, 0])
    for name in ("a", "b", "c"):
        cell.join(name)
    assert [name for name, *_ in cell.served()] == ["a", "b", "c"]
    assert len(cell.line) == 0


def test_pictures_of_one_job_go_to_whoever_has_room_and_come_before_larger_jobs() -> None:
    cell = Cell(request_level, [1, 1])
    cell.join("three", replace(ONE_ROW, shapes=ONE_ROW.shapes * 3))
    cell.join("next", replace(ONE_ROW, shapes=(RowShape(0, 16, 16, 40),)))
    assert cell.served() == [("three", "w0", 1), ("three", "w1", 1)]
    left = [(entry.job_id, entry.rows, entry.demand.rows) for entry in cell.line.order(0)]
    assert left == [("three", (2,), 1), ("next", (0,), 1)]
    cell.tell(0, rows=0)
    cell.tell(1, rows=0)
    assert [name for name, *_ in cell.served()] == ["three", "next"]


def test_rows_that_one_worker_gets_together_are_one_attempt() -> None:
    cell = Cell(request_level, [0, 0])
    cell.join("four", replace(ONE_ROW, shapes=ONE_ROW.shapes * 4))
    key = next(iter(cell.line)).key
    assert cell.decide().placements == (RowAssignment(key, "w0", (0, 2)), RowAssignment(key, "w1", (1, 3)))


def test_the_simulators_baselines_keep_jobs_whole() -> None:
    cell = Cell(request_level, [1, 0], spreads=False)
    cell.join("two", replace(ONE_ROW, shapes=ONE_ROW.shapes * 2))
    assert cell.served() == [("two", "w1", 2)]


def test_smaller_jobs_pass_one_that_finds_no_room_but_not_for_ever() -> None:
    cell = Cell(request_level, [1, 1])
    cell.join("large", replace(ONE_ROW, shapes=ONE_ROW.shapes * 2, together=True))
    for number in range(MAX_PASSED):
        cell.join(f"s{number}")
        [(name, worker, _)] = cell.served()
        assert name == f"s{number}"
        cell.placement.release(name, int(worker[1:]))
    for name in ("late", "later"):
        cell.join(name)
    assert [name for name, *_ in cell.served()] == ["late"], "one of two workers is kept free"


def test_it_wakes_when_a_batch_job_behind_choosy_ones_ages() -> None:
    cell = Cell(lambda able, demand: able[0] if demand.ticket >= MAX_CHOOSY else None, [0])
    for number in range(MAX_CHOOSY):
        cell.join(f"choosy{number}")
    cell.join("batch", priority=Priority.BATCH, tenant="other")
    assert cell.decide() == SchedulingDecision(wake_at=AGEING_S)
    [batch] = cell.decide(AGEING_S).placements
    assert batch.key[0] == "batch"
    assert cell.decide(AGEING_S).wake_at is None, "time changes nothing more"


def test_nothing_is_waited_for_where_only_a_worker_can_help() -> None:
    cell = Cell(request_level, [2])
    cell.join("batch", priority=Priority.BATCH)
    assert cell.decide() == SchedulingDecision()


def test_choosy_jobs_of_a_model_hold_up_no_other_model() -> None:
    """More jobs of one model wait for a better worker than are asked; the other model's worker is free."""
    cell = Cell(lambda able, demand: able[0] if demand.model != MODEL else None, [0])
    (card,) = TOLD.models
    worker = WorkerState(capacity_rows=2, capacity_tokens=999)
    told = {
        "instance": "w1",
        "worker": worker,
        "models": (card.model_copy(update={"name": "other", "digest": "1"}),),
    }
    cell.placement.observe(TOLD.model_copy(update=told), 0.0)
    for number in range(MAX_CHOOSY + 1):
        cell.join(f"j{number}")
    cell.join("other", replace(ONE_ROW, model="other", model_digest="1"))
    assert cell.served() == [("other", "w1", 1)]
