"""What the router knows of pools: whose deadlines a job keeps and breaks, and when rows end on several devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.scheduling.degrees.pool import DEGREES, PoolRow
from giornata.scheduling.demand import (
    JobDemand,
    PlacementEstimate,
    RowShape,
    StepTimeModel,
    WorkerLoad,
)
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import POLICIES, PolicyName
from giornata.scheduling.pool_rows import PoolFinishEstimator
from giornata.scheduling.worker_state import pool_of
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.workers import (
    DegreeCosts,
    RankPhase,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    WorkerCosts,
    WorkerState,
)
from giornata_lab.bench.systems.networks import plain
from tests.fakes.fleet import CARD, state_of, worker_costs
from tests.present import present

STEPS = 10
EDGES = ControlCard(name="edges", digest="e" * 64, kind=ControlKind.FLUX, text_channels=8)
LARGE, SMALL = 800, 100
"""Tokens: 0.8 and 0.1 s a step on one device."""


def speedup(degree: int) -> float:
    return degree / (1 + 0.05 * (degree - 1))


def costs(*degrees: int) -> WorkerCosts:
    """A millisecond a token on one device; k of them are as fast as `speedup` says."""
    wide = (DegreeCosts(degree=k, compute=worker_costs(0.0, 0.0, 1 / speedup(k)).compute) for k in degrees)
    return worker_costs(0.0, 0.0, 1.0).model_copy(update={"degrees": tuple(wide)})


def row(job: str, tokens: int, *, step: int = 5, degree: int = 1, due_s: float | None = None) -> RowProgress:
    return RowProgress(
        job_id=job,
        attempt=1,
        index=0,
        step=step,
        steps=STEPS,
        tokens=tokens,
        begun=step > 0,
        degree=degree if step else 0,
        due_ms=None if due_s is None else due_s * 1e3,
        encoded=True,
    )


def worker(
    name: str,
    rows: Sequence[RowProgress] = (),
    *,
    ready: int = 1,
    lost: int = 0,
    told: WorkerCosts | None = None,
) -> ServiceState:
    phases = [RankPhase.READY] * ready + [RankPhase.LOST] * lost
    ranks = tuple(RankState(device=f"cuda:{at}", phase=phase) for at, phase in enumerate(phases))
    pool = len(ranks) > 1
    shown = WorkerState(
        capacity_rows=16,
        capacity_tokens=1 << 20,
        running=tuple(rows),
        cost_model=told or costs(*(DEGREES[1:] if pool else ())),
        blocks=plain(1),
        ranks=ranks if pool else (),
    )
    return state_of(ServiceName.DENOISER, name, models=(CARD,), worker=shown)


def demand(tokens: int, within_s: float | None = None) -> JobDemand:
    shape = RowShape(0, tokens, tokens, STEPS)
    return JobDemand(CARD.name, CARD.digest, (shape,), within_ms=None if within_s is None else within_s * 1e3)


def fleet(*workers: ServiceState) -> Placement:
    placement = Placement()
    for state in workers:
        placement.observe(state, 0.0)
    return placement


def chosen(
    placement: Placement, asked: JobDemand, policy: PolicyName = PolicyName.DEADLINE_AWARE
) -> str | None:
    best = POLICIES[policy](placement.candidates(asked, 8), asked)
    return None if best is None else best.instance


def predicted(placement: Placement, asked: JobDemand) -> dict[str, PlacementEstimate]:
    return {each.instance: each.prediction() for each in placement.candidates(asked, 8)}


def test_a_large_job_goes_to_the_pool_that_keeps_its_deadline_and_breaks_none() -> None:
    promised = [row(f"p{number}", LARGE, step=0, due_s=4.5) for number in range(4)]
    others = [row(f"o{number}", LARGE, step=0) for number in range(8)]
    placement = fleet(worker("promised", promised, ready=8), worker("others", others, ready=8))
    asked = demand(LARGE, within_s=1.5)  # all eight devices for 1.35 s
    effects = predicted(placement, asked)
    assert (effects["promised"].gained or 0) <= 0, "its own deadline costs at least one of theirs"
    assert effects["others"].gained == 1
    assert effects["others"].finish_ms <= 1500
    assert chosen(placement, asked) == "others", "its rows are delayed, but no deadline of theirs is broken"
    assert chosen(placement, demand(LARGE, within_s=9.0)) == "promised", "there is time after the promises"


@pytest.mark.parametrize("ready", [1, 2, 8])
def test_a_pool_is_as_fast_as_its_devices_of_now(ready: int) -> None:
    now = worker("pool", ready=ready, lost=8 - ready)
    assert predicted(fleet(worker("pool", ready=8), now), demand(LARGE)) == predicted(
        fleet(now), demand(LARGE)
    )


def test_a_job_with_controlnets_goes_to_a_pool_that_has_them_or_where_there_is_nothing_else() -> None:
    with_lora = replace(demand(SMALL), adapters=(NeededLora("a" * 64, 1),))
    asked = replace(demand(SMALL), controls=(NeededControl(EDGES.digest, 1.0),))
    busy = [row("busy", LARGE)]
    alone = worker("alone", busy).model_copy(update={"controlnets": (EDGES,)})
    placement = fleet(alone, worker("pool", ready=8))
    assert chosen(placement, demand(SMALL)) == "pool"
    assert chosen(placement, with_lora) == "pool"
    assert chosen(placement, asked) == "alone", "ranks ask no service"
    has = worker("pool", ready=8).model_copy(update={"controlnets": (EDGES,)})
    assert chosen(fleet(alone, has), asked) == "pool"
    assert chosen(fleet(worker("pool", ready=8)), asked) == "pool", (
        "which refuses it, so that it does not wait"
    )


def test_a_job_that_fits_between_promises_goes_where_it_delays_least() -> None:
    promised = [row("p", LARGE, step=0, due_s=5.0)]
    others = [row(f"o{number}", LARGE, step=0) for number in range(8)]
    placement = fleet(worker("promised", promised, ready=8), worker("others", others, ready=8))
    assert chosen(placement, demand(LARGE, within_s=3.0)) == "promised"


def test_only_several_devices_keep_a_short_deadline() -> None:
    placement = fleet(worker("one"), worker("pool", [row("a", SMALL)], ready=8))
    assert chosen(placement, demand(LARGE, within_s=2.0)) == "pool"
    assert chosen(placement, demand(SMALL, within_s=2.0)) == "one", "no other row is delayed there"


def test_devices_that_are_lost_keep_no_promise() -> None:
    placement = fleet(worker("whole", ready=8), worker("broken", ready=3, lost=5))
    effects = predicted(placement, demand(LARGE, within_s=1.5))
    assert (effects["whole"].gained, effects["broken"].gained) == (1, 0)
    assert chosen(placement, demand(LARGE, within_s=1.5)) == "whole"
    placement.observe(worker("whole", ready=3, lost=5), 1.0)
    assert predicted(placement, demand(LARGE, within_s=1.5))["whole"].gained == 0


def test_what_was_just_assigned_counts_with_its_deadline() -> None:
    placement = fleet(worker("a", ready=8), worker("b", ready=8))
    asked = demand(LARGE, within_s=1.5)
    assert chosen(placement, asked) == "a"
    placement.assign("job", 1, "a", asked, 0.0)
    assert chosen(placement, asked) == "b"
    assert predicted(placement, asked)["a"].gained == 0


def test_a_pool_whose_profile_lacks_degrees_keeps_no_promise_by_them() -> None:
    placement = fleet(worker("pool", ready=8, told=costs(2)))
    effects = predicted(placement, demand(LARGE, within_s=4.5))
    assert effects["pool"].gained == 1, "two devices take 4.2 s"
    assert predicted(placement, demand(LARGE, within_s=4.1))["pool"].gained == 0


def test_rows_without_deadline_end_as_the_devices_are_many() -> None:
    rows = [row(f"o{number}", LARGE) for number in range(3)]
    placement = fleet(worker("one", rows[:1]), worker("four", rows, ready=4))
    effects = predicted(placement, demand(LARGE))
    assert effects["four"].finish_ms < effects["one"].finish_ms
    assert effects["four"].gained is None
    assert chosen(placement, demand(LARGE), PolicyName.FINISH_TIME) == "four"
    assert chosen(placement, demand(LARGE)) == "four"


def test_the_end_of_a_job_and_the_backlog_count_devices() -> None:
    placement = fleet(worker("four", [row("a", LARGE), row("b", LARGE)], ready=4))
    for job in ("a", "b"):
        placement.assign(job, 1, "four", demand(LARGE), 0.0)
    assert placement.finish_ms("a") == pytest.approx(5 * LARGE / speedup(2))
    (prospect,) = placement.prospects(demand(LARGE))
    assert prospect.drained_ms == pytest.approx(5 * LARGE / speedup(2))
    assert prospect.row_ms == pytest.approx(STEPS * LARGE / 4)
    assert placement.least_ms(demand(LARGE)) == pytest.approx(STEPS * LARGE / speedup(4))


@pytest.mark.parametrize(("step", "pays"), [(0, False), (5, True)])
def test_a_masked_row_pays_for_a_move_unless_it_begins_with_its_correction(step: int, pays: bool) -> None:
    """One that was handed over has begun, and computed no step here."""
    shown = row("a", LARGE, step=step).model_copy(update={"computed_tokens": SMALL, "begun": True})
    pool = present(pool_of(StepTimeModel(), present(worker("pool", ready=8).worker)))
    [listed] = pool.of([shown], None, (), 0)
    assert (listed.moved_s[1] > listed.step_s[1]) is pays


TIMES = {1: 1.0, 2: 0.6, 4: 0.4}
MOVED = {1: 3.0, 2: 1.8, 4: 1.2}


def pool_row(key: int, left: int, due_s: float = math.inf, *, begun: bool = True) -> PoolRow:
    return PoolRow(
        key, 0.0, due_s, left, TIMES, TIMES if begun else MOVED, (0,) if begun else (), place=float(key)
    )


def outlook(*rows: PoolRow, devices: int = 4) -> PoolFinishEstimator:
    return PoolFinishEstimator(devices, rows, WorkerLoad(8, 0.0))


def test_a_row_alone_has_all_devices_and_two_share_them() -> None:
    assert outlook(pool_row(0, 10)).ends_ms == [pytest.approx(4000)]
    # both at degree 2 until one leaves, then the other at degree 4
    assert outlook(pool_row(0, 10), pool_row(1, 5)).ends_ms == pytest.approx([3000 + 5 * 400, 3000])


def test_more_rows_than_devices_wait_in_their_order() -> None:
    rows = [pool_row(number, 2) for number in range(3)]
    assert outlook(*rows, devices=2).ends_ms == pytest.approx([2000, 2000, 2000 + 2 * 600])


def test_rows_in_time_come_first_by_deadline_and_late_ones_with_the_others() -> None:
    late, line, urgent = pool_row(0, 4, due_s=0.5), pool_row(1, 4), pool_row(2, 4, due_s=4.5)
    ends = outlook(late, line, urgent, devices=1).ends_ms
    assert ends == pytest.approx([8000, 12_000, 4000])


def test_the_first_step_on_new_devices_takes_as_long_as_it_does() -> None:
    assert outlook(pool_row(0, 4, begun=False), devices=1).ends_ms == [pytest.approx(6000)]


def test_what_a_row_waits_for_first_comes_off_its_time() -> None:
    pool = outlook()
    assert pool.predict([pool_row(0, 10, due_s=4.5)]).gained == 1
    late = pool.predict([pool_row(0, 10, due_s=4.5)], ready_ms=600.0)
    assert late.gained == 0
    assert late.finish_ms == pytest.approx(4600)


def test_a_job_in_the_place_of_another_ones_promise_gains_nothing() -> None:
    pool = outlook(pool_row(0, 10, due_s=4.5))
    effect = pool.predict([pool_row(1, 6, due_s=2.5)])
    assert effect.gained == 0
    assert pool.predict([pool_row(1, 6, due_s=9.0)]).gained == 1
