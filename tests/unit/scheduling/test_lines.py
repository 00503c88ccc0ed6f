"""What every line keeps: nothing is lost, doubled or starved; batch jobs yield, and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.queue import AGEING_S, DemandTotal, FairQueue, Key, RowQueue, SchedulingParams
from giornata.wire.jobs import Priority
from giornata_lab.simulation.rock_kinds import JobKindModel, JobKindQueue
from tests.lab.simulation.test_kinds import MODEL


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


def demand(rows: int, steps: int, loras: int = 0) -> JobDemand:
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
