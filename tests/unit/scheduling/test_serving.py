"""Who is served next: what waits for a better worker holds up nobody, what finds no room is not starved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from giornata.scheduling.demand import Demand, RowShape
from giornata.scheduling.line import Entry, Line, Turn
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import Candidate, Policy, request_level, with_room
from giornata.scheduling.serving import MAX_PASSED, serve
from giornata.wire.workers import RowProgress, WorkerState
from giornata_tools.simulation.jobs import DIGEST, MODEL
from giornata_tools.simulation.simulator import TOLD

DEMAND = Demand(MODEL, DIGEST, (RowShape(0, 16, 16, 10),))


def placement(policy: Policy, rows: Sequence[int]) -> Placement:
    """Workers w0, w1 ... with two places and so many rows each."""
    made = Placement(policy)
    for number, count in enumerate(rows):
        tell(made, number, count)
    return made


def tell(where: Placement, number: int, rows: int) -> None:
    running = tuple(
        RowProgress(job_id=f"r{number}", attempt=1, index=index, step=0, steps=10, tokens=16)
        for index in range(rows)
    )
    worker = WorkerState(capacity_rows=2, capacity_tokens=999, running=running)
    where.observe(TOLD.model_copy(update={"instance": f"w{number}", "worker": worker}), 0.0)


def served(line: Line, where: Placement) -> list[tuple[str, str]]:
    found = []
    for entry, worker in serve(line, where, 0.0):
        where.assign(entry.job_id, 1, worker, entry.demand, 0.0)
        found.append((entry.job_id, worker))
    return found


def serve_all(line: Line, where: Placement) -> list[tuple[Entry, str]]:
    """Each piece as an attempt of its own."""
    found: list[tuple[Entry, str]] = []
    for entry, worker in serve(line, where, 0.0):
        where.assign(entry.job_id, len(found), worker, entry.demand, 0.0)
        found.append((entry, worker))
    return found


def join(line: Line, job_id: str, demand: Demand) -> None:
    line.join(job_id, demand, Turn(tenant="t"), 0.0)


def only(instance: str, job: int) -> Policy:
    """The job of this ticket waits for `instance`; others take the first that has room."""

    def policy(candidates: Sequence[Candidate], demand: Demand) -> Candidate | None:
        able = with_room(candidates, demand)
        return next((c for c in able if demand.ticket != job or c.instance == instance), None)

    return policy


def test_a_job_that_waits_for_a_better_worker_holds_up_nobody() -> None:
    line = Line()
    for name in ("choosy", "a", "b"):
        join(line, name, DEMAND)
    where = placement(only("w0", 0), [2, 0])
    assert served(line, where) == [("a", "w1"), ("b", "w1")]
    tell(where, 0, rows=1)
    assert served(line, where) == [("choosy", "w0")], "and is asked first when that one has room"


def test_in_order_as_long_as_there_is_room() -> None:
    line = Line()
    for name in ("a", "b", "c"):
        join(line, name, DEMAND)
    assert [name for name, _ in served(line, placement(request_level, [1, 0]))] == ["a", "b", "c"]
    assert len(line) == 0


def test_pictures_of_one_job_go_to_whoever_has_room_and_come_before_later_jobs() -> None:
    line, three = Line(), replace(DEMAND, shapes=DEMAND.shapes * 3)
    join(line, "three", three)
    join(line, "next", DEMAND)
    where = placement(request_level, [1, 1])
    found = [(e.job_id, e.demand.rows, name) for e, name in serve_all(line, where)]
    assert found == [("three", 1, "w0"), ("three", 1, "w1")]
    assert [(entry.job_id, entry.demand.rows) for entry in line.order(0)] == [("three", 1), ("next", 1)]
    tell(where, 0, rows=0)
    tell(where, 1, rows=0)
    assert [name for name, _ in served(line, where)] == ["three", "next"]


def test_the_simulators_baselines_keep_jobs_whole() -> None:
    line = Line()
    join(line, "two", replace(DEMAND, shapes=DEMAND.shapes * 2))
    where = placement(request_level, [1, 0])
    assert [(e.demand.rows, name) for e, name in serve(line, where, 0.0, spreads=False)] == [(2, "w1")]


def test_smaller_jobs_pass_one_that_finds_no_room_but_not_for_ever() -> None:
    line = Line()
    where = placement(request_level, [1, 1])
    join(line, "large", replace(DEMAND, shapes=DEMAND.shapes * 2, together=True))
    for number in range(MAX_PASSED):
        join(line, f"s{number}", DEMAND)
        [(name, _)] = served(line, where)
        assert name == f"s{number}"
        where.release(name, 1)
    for name in ("late", "later"):
        join(line, name, DEMAND)
    assert [name for name, _ in served(line, where)] == ["late"], "one of two workers is kept free"
