"""What every line keeps, and who comes next: nothing is lost, doubled or starved; batch jobs yield, and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.queue import (
    AGEING_S,
    DEFERRED,
    FAVOURED,
    DemandTotal,
    FairQueue,
    Key,
    QueuedRows,
    RowQueue,
    SchedulingParams,
    TenantJobOrder,
)
from giornata.wire.jobs import Priority
from giornata_lab.simulation.rock_kinds import JobKindModel, JobKindQueue
from tests.lab.simulation.test_kinds import MODEL
from tests.present import present


def sorted_by_kind() -> JobKindQueue:
    line = JobKindQueue()
    line.use(MODEL)
    return line


LINES: Final[dict[str, Callable[[], RowQueue]]] = {
    "fair": FairQueue,
    "by deadline": partial(FairQueue, by_deadline=True),
    "kinds": sorted_by_kind,
    "one kind": JobKindQueue,
}
lines = pytest.mark.parametrize("make", LINES.values(), ids=LINES)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("join"),
            st.integers(1, 3),
            st.sampled_from([10, 30, 50]),
            st.sampled_from(list(Priority)),
            st.sampled_from(["a", "b"]),
            st.integers(0, 2),
        ),
        st.tuples(st.just("serve"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.floats(0, 40)),
    ),
    max_size=40,
)


def demand(rows: int = 1, steps: int = 10, loras: int = 0) -> JobDemand:
    adapters = tuple(NeededLora(f"l{number}", 50_000_000) for number in range(loras))
    return JobDemand("m", "d", (RowShape(0, 16, 16, steps),) * rows, adapters=adapters)


@lines
@given(actions=ACTIONS)
def test_no_row_is_lost_or_doubled(make: Callable[[], RowQueue], actions: list[tuple[object, ...]]) -> None:
    """Beside a model: the rows of each entry that wait."""
    line, now, waiting, joined = make(), 0.0, dict[Key, set[int]](), 0
    for action, *what in actions:
        now += 0.5
        if action == "join":
            rows, steps, priority, tenant, loras = what
            claim = SchedulingParams(
                *(Priority(str(priority)), str(tenant)),
                finish_by_s=now + 30.0 if loras else None,
                takes_s=steps / 10,  # type: ignore[operator]
            )
            entry = line.join(f"j{joined}", demand(rows, steps, loras), claim, now)  # type: ignore[arg-type]
            waiting[entry.key], joined = set(entry.rows), joined + 1
        elif action == "wait":
            now += what[0]  # type: ignore[operator]
        elif order := line.order(now):
            entry = order[what[0] % len(order)]  # type: ignore[operator]
            if action == "leave":
                line.leave(entry.key)
                line.leave(entry.key)  # as often as it is said
                del waiting[entry.key]
                continue
            given_rows = entry.rows[: what[1]]  # type: ignore[index]
            served = line.serve(entry.key, given_rows, now)
            assert served.rows == len(given_rows)
            waiting[entry.key] -= set(given_rows)
            if not waiting[entry.key]:
                del waiting[entry.key]
        order = line.order(now)
        assert Counter(entry.key for entry in order) == Counter(waiting.keys())
        assert {entry.key: set(entry.rows) for entry in order} == waiting
        assert sum(line.models.values()) == sum(map(len, waiting.values()))
        assert len(line) == len(waiting)
        for name in {key[0] for key in waiting}:
            assert name in line
    for key in list(waiting):
        line.leave(key)
    assert (len(line), dict(line.models), line.total) == (0, {}, DemandTotal())


@lines
def test_batch_jobs_come_after_interactive_ones_until_they_have_waited(make: Callable[[], RowQueue]) -> None:
    line = make()
    line.join("batch", demand(1, 10), SchedulingParams(Priority.BATCH, takes_s=1.0), 0.0)
    line.join("interactive", demand(1, 50, 2), SchedulingParams(takes_s=5.0), 1.0)
    assert [entry.job_id for entry in line.order(2.0)] == ["interactive", "batch"]
    assert line.changes_at(2.0) == pytest.approx(AGEING_S)
    assert next(entry.job_id for entry in line.order(AGEING_S + 0.1)) == "batch"


@lines
def test_nobody_starves_beside_jobs_that_keep_coming(make: Callable[[], RowQueue]) -> None:
    """A place is free every second, and two jobs of another kind come every second: the odd ones are served too."""
    line, served = make(), list[str]()
    line.join("odd", demand(1, 50, 2), SchedulingParams(takes_s=5.0), 0.0)
    for second in range(400):
        for number in range(2):
            line.join(f"j{second}.{number}", demand(1, 10), SchedulingParams(takes_s=1.0), float(second))
        first = line.order(float(second))[0]
        line.serve(first.key, first.rows, float(second))
        served.append(first.job_id)
        if "odd" in served:
            break
    assert "odd" in served


@lines
def test_who_was_told_to_load_is_kept_where_rows_are_left(make: Callable[[], RowQueue]) -> None:
    line = make()
    entry = line.join("j", demand(3, 10), SchedulingParams(), 0.0)
    line.tell(entry.key, "w1")
    line.serve(entry.key, (0,), 0.0)
    (left,) = line.order(0.0)
    assert (left.fetching, left.rows) == ("w1", (1, 2))


def test_queues_of_kinds_take_turns_by_their_work() -> None:
    line = sorted_by_kind()
    for number in range(6):
        line.join(f"short{number}", demand(1, 20), SchedulingParams(takes_s=2.0), 0.0)
    for number in range(2):
        line.join(f"long{number}", demand(1, 50, 2), SchedulingParams(takes_s=6.0), 0.0)
    assert [entry.job_id for entry in line.order(0.0)] == [
        *("short0", "long0", "short1", "short2", "short3", "long1", "short4", "short5"),
    ]
    model: JobKindModel = MODEL
    assert model.components == 2


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
        line.join(f"j{i}", demand(1, 5 - i), SchedulingParams(tenant="a", takes_s=5.0 - i), i)
    assert order(line) == [f"j{i}" for i in expected]


def test_work_that_workers_have_counts_no_more() -> None:
    line = FairQueue()
    line.join("large", demand(4), SchedulingParams(takes_s=1.0), 0)
    line.join("small", demand(2), SchedulingParams(takes_s=1.0), 0)
    assert order(line) == ["small", "large"]
    serve(line, "large", 3)
    assert order(line) == ["large", "small"]


def test_small_jobs_without_end_do_not_starve_a_large_one_of_their_tenant() -> None:
    line, served = FairQueue(), list[str]()
    line.join("large", demand(1, 1000), SchedulingParams(takes_s=4.0), 0)
    for i in range(40):
        line.join(f"small{i}", demand(1, 1), SchedulingParams(takes_s=0.1), i)
        served.append(order(line, i)[0])
        serve(line, served[-1], now=i)
    assert served.index("large") == DEFERRED * 4, "it lets those pass that come within twice its own work"


def test_rows_that_stay_together_are_not_passed_by_smaller_jobs() -> None:
    line = FairQueue()
    line.join("small", demand(1, 1), SchedulingParams(takes_s=0.1), 0)
    line.join("lost", replace(demand(4), together=True), SchedulingParams(takes_s=4.0), 1)
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
                demand(1, steps),
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


def test_so_many_urgent_jobs_pass_one_that_has_waited_long() -> None:
    line, served = FairQueue(by_deadline=True), list[str]()
    line.join("whenever", demand(), SchedulingParams(), 0)
    for i in range(FAVOURED + 2):
        line.join(f"urgent{i}", demand(), SchedulingParams(finish_by_s=2 * AGEING_S + i), 0)
    while waiting := order(line, AGEING_S):
        served.append(waiting[0])
        serve(line, waiting[0], now=AGEING_S)
    assert served.index("whenever") == FAVOURED


def test_a_job_leaves_in_pieces_and_what_comes_back_waits_beside_the_rest() -> None:
    line = FairQueue()
    line.join("j", demand(3), SchedulingParams(), 0)
    rest = present(serve(line, "j", 2))
    assert (rest.demand.rows, len(line), line.models) == (1, 1, {("m", "d"): 1})
    back = line.join("j", demand(1, 20), SchedulingParams(), 1)
    assert [entry.key for entry in line.order(2)] == [rest.key, back.key]
    assert serve(line, "j") is None
    assert "j" in line
    line.leave(back.key)
    line.leave(rest.key)
    assert ("j" in line, len(line), line.models) == (False, 0, {})
