"""Who comes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.queue import (
    AGEING_S,
    DEFERRED,
    FAVOURED,
    FairQueue,
    QueuedRows,
    RowQueue,
    SchedulingParams,
    TenantJobOrder,
)
from giornata.wire.jobs import Priority


def demand(steps: int = 10) -> JobDemand:
    return JobDemand("m", "d", (RowShape(0, 16, 16, steps),))


def serve(line: RowQueue, job_id: str, rows: int = 1, now: float = 0.0) -> QueuedRows | None:
    """So many rows of the job's first entry; what is left of it."""
    first = next(entry for entry in line if entry.job_id == job_id)
    line.serve(first.key, first.rows[:rows], now)
    return next((entry for entry in line if entry.key == first.key), None)


def order(line: RowQueue, now: float = 0.0) -> list[str]:
    return [entry.job_id for entry in line.order(now)]


@pytest.mark.parametrize(
    ("turn", "expected"), [(TenantJobOrder.LEAST_WORK, "43210"), (TenantJobOrder.ARRIVAL, "01234")]
)
def test_of_one_tenants_jobs_the_least_comes_first_or_the_earliest(
    turn: TenantJobOrder, expected: str
) -> None:
    line = FairQueue(turn=turn)
    for i in range(5):
        line.join(f"j{i}", demand(5 - i), SchedulingParams(tenant="a", takes_s=5.0 - i), i)
    assert order(line) == [f"j{i}" for i in expected]


def test_work_that_workers_have_counts_no_more() -> None:
    line, shape = FairQueue(), RowShape(0, 16, 16, 10)
    line.join("large", JobDemand("m", "d", (shape,) * 4), SchedulingParams(takes_s=1.0), 0)
    line.join("small", JobDemand("m", "d", (shape,) * 2), SchedulingParams(takes_s=1.0), 0)
    assert order(line) == ["small", "large"]
    serve(line, "large", 3)
    assert order(line) == ["large", "small"]


def test_small_jobs_without_end_do_not_starve_a_large_one_of_their_tenant() -> None:
    line, served = FairQueue(), list[str]()
    line.join("large", demand(1000), SchedulingParams(takes_s=4.0), 0)
    for i in range(40):
        line.join(f"small{i}", demand(1), SchedulingParams(takes_s=0.1), i)
        served.append(order(line, i)[0])
        serve(line, served[-1], now=i)
    assert served.index("large") == DEFERRED * 4, (
        "it lets those pass that come within five times its own work"
    )


def test_the_scheduler_is_told_when_a_batch_job_has_aged_and_that_nothing_else_changes() -> None:
    line = FairQueue()
    line.join("j", demand(), SchedulingParams(takes_s=1.0), 1)
    assert line.changes_at(2) is None
    line.join("batch", demand(), SchedulingParams(Priority.BATCH), 3)
    assert line.changes_at(4) == 3 + AGEING_S
    assert line.changes_at(3 + AGEING_S) is None


def test_rows_that_stay_together_are_not_passed_by_smaller_jobs() -> None:
    line, shape = FairQueue(), RowShape(0, 16, 16, 10)
    line.join("small", demand(1), SchedulingParams(takes_s=0.1), 0)
    line.join("lost", JobDemand("m", "d", (shape,) * 4, together=True), SchedulingParams(takes_s=4.0), 1)
    assert order(line, 2) == ["lost", "small"]


works = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(
    works=st.lists(works, min_size=2, max_size=4), weights=st.lists(st.floats(0.5, 4), min_size=4, max_size=4)
)
@pytest.mark.parametrize("turn", TenantJobOrder)
def test_tenants_that_wait_get_their_shares_but_for_one_job_each(
    turn: TenantJobOrder, works: list[list[int]], weights: list[float]
) -> None:
    """Theorem 1 of Goyal, Vin and Cheng, in whichever order a tenant's own jobs come."""
    line, got = FairQueue(turn=turn), [0.0] * len(works)
    for tenant, own in enumerate(works):
        for number, steps in enumerate(own):
            line.join(
                f"{tenant}.{number}",
                demand(steps),
                SchedulingParams(tenant=str(tenant), weight=weights[tenant]),
                0,
            )
    left = [len(own) for own in works]
    while all(left):
        job_id = order(line)[0]
        tenant, number = map(int, job_id.split("."))
        serve(line, job_id)
        left[tenant] -= 1
        got[tenant] += works[tenant][number] / weights[tenant]
        most = [max(own) / weight for own, weight in zip(works, weights, strict=False)]
        assert max(got) - min(got) <= 2 * max(most) + 1e-9


def test_the_earliest_deadline_comes_first_while_it_can_be_met() -> None:
    line = FairQueue(by_deadline=True)
    line.join("whenever", demand(), SchedulingParams(), 0)
    line.join("later", demand(), SchedulingParams(finish_by_s=20), 0)
    line.join("soon", demand(), SchedulingParams(finish_by_s=10), 0)
    assert order(line, 5) == ["soon", "later", "whenever"]
    assert order(line, 15) == ["later", "whenever", "soon"], "who is late takes its turn"
    assert order(FairQueue(), 5) == []
    [soon] = [entry for entry in line if entry.job_id == "soon"]
    assert soon.asked(4).within_ms == pytest.approx(6000)


def test_a_deadline_that_cannot_be_met_any_more_is_no_claim() -> None:
    line = FairQueue(by_deadline=True)
    line.join("whenever", demand(), SchedulingParams(), 0)
    line.join("tight", demand(), SchedulingParams(finish_by_s=10, takes_s=4), 0)
    assert order(line, 5.9) == ["tight", "whenever"]
    assert order(line, 6) == ["whenever", "tight"]


def test_urgent_jobs_without_end_do_not_starve_one_that_takes_its_turn() -> None:
    line, served = FairQueue(by_deadline=True), list[str]()
    line.join("whenever", demand(), SchedulingParams(), 0)
    line.join("batch", demand(), SchedulingParams(Priority.BATCH), 0)
    for i in range(10 * FAVOURED):
        line.join(f"urgent{i}", demand(), SchedulingParams(finish_by_s=i + 5.0), i)
        served.append(order(line, i)[0])
        serve(line, served[-1], now=i)
    after = AGEING_S + FAVOURED + 2
    assert AGEING_S <= served.index("whenever") < after
    assert served.index("batch") < after + FAVOURED
    assert sum(job.startswith("urgent") for job in served) == 10 * FAVOURED - 2


@given(backlog=st.integers(1, 200))
def test_a_new_tenant_is_served_after_at_most_one_job_of_each_other(backlog: int) -> None:
    line = FairQueue()
    for i in range(backlog):
        line.join(f"a{i}", demand(), SchedulingParams(tenant="a"), 0)
        line.join(f"b{i}", demand(), SchedulingParams(tenant="b"), 0)
    for entry in line.order(0)[: backlog // 2]:
        serve(line, entry.job_id)
    line.join("new", demand(), SchedulingParams(tenant="c"), 1)
    assert order(line, 1).index("new") <= 2


def test_a_job_leaves_in_pieces_and_what_comes_back_waits_beside_the_rest() -> None:
    line, shape = FairQueue(), RowShape(0, 16, 16, 10)
    line.join("j", JobDemand("m", "d", (shape,) * 3), SchedulingParams(), 0)
    rest = serve(line, "j", 2)
    assert rest is not None
    assert (rest.demand.rows, len(line), line.models) == (1, 1, {("m", "d"): 1})
    back = line.join("j", demand(20), SchedulingParams(), 1)
    assert [entry.key for entry in line.order(2)] == [rest.key, back.key]
    assert serve(line, "j") is None
    assert "j" in line
    line.leave(back.key)
    line.leave(rest.key)
    assert ("j" in line, len(line), line.models) == (False, 0, {})
