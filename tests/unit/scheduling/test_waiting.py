"""Whose turn it is among all queued jobs, and which rows give way: tenants take turns by their shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import (
    AGEING_S,
    FairQueue,
    FairShares,
    InFlightJobWindow,
    JobQueue,
    NextJob,
    QueuedJob,
    SchedulingParams,
)
from giornata.scheduling.scheduler import find_yielding_attempt
from giornata.scheduling.worker_state import Attempt
from giornata.wire.jobs import Priority
from giornata_lab.bench.systems.networks import plain
from tests.fakes.fleet import worker_costs
from tests.present import present
from tests.unit.scheduling.test_placement import DEMAND, row, telling, worker

BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def job(
    name: str,
    tenant: str = "a",
    priority: Priority = INTERACTIVE,
    *,
    weight: float = 1.0,
    since_s: float = 0.0,
    budget_s: float = 1e6,
    rows: int = 1,
) -> QueuedJob:
    return QueuedJob(name, priority, tenant, weight, "digest", rows, 10, since_s, budget_s)


def serve(waiting: JobQueue, now: float = 0.0) -> str:
    turn = present(waiting.next(now))
    waiting.serve(turn)
    return turn.job.job_id


def rest(waiting: JobQueue, now: float = 0.0) -> list[str]:
    return [serve(waiting, now) for _ in range(len(waiting))]


def test_a_tenant_with_9000_jobs_delays_anothers_one_job_by_one_job() -> None:
    waiting = JobQueue()
    for i in range(9000):
        waiting.join(job(f"many{i}", "many"))
    for i in range(100):
        assert serve(waiting) == f"many{i}", "a tenant's jobs come in order"
    few = job("few", "few")
    assert waiting.ahead(few) == 1
    waiting.join(few)
    assert waiting.ahead(few) == 1
    assert "few" in {serve(waiting), serve(waiting)}


def test_a_flood_of_batch_jobs_lets_interactive_ones_pass_and_ages() -> None:
    waiting = JobQueue()
    for i in range(1000):
        waiting.join(job(f"batch{i}", priority=BATCH))
    waiting.join(job("now", since_s=1.0))
    assert waiting.ahead(job("next")) == 1
    assert waiting.ahead(job("other", "b", BATCH)) == 2, "one is interactive, one of the other tenant"
    turn = present(waiting.next(1.0))
    assert (turn.job.job_id, turn.yields) == ("now", False)
    assert serve(waiting, 1.0) == "now"
    late = AGEING_S + 1
    turn = present(waiting.next(late))
    assert not turn.yields, "it has aged"
    for i in range(50):  # of the same tenant, and after all batch jobs have aged
        waiting.join(job(f"now{i}", since_s=late))
    first = [serve(waiting, late) for _ in range(40)]
    assert first[:4] in (["batch0", "now0", "batch1", "now1"], ["now0", "batch0", "now1", "batch1"])
    assert sum(name.startswith("batch") for name in first) == 20


def test_a_cancelled_job_costs_its_tenant_nothing() -> None:
    waiting = JobQueue()
    for i in range(100):
        waiting.join(job(f"a{i}", "a"))
    waiting.join(job("last", "a"))
    for i in range(100):
        assert waiting.leave(f"a{i}") is not None
    assert waiting.leave("a1") is None
    waiting.join(job("b0", "b"))
    waiting.join(job("b1", "b"))
    assert waiting.ahead(job("last", "a")) == 1
    assert rest(waiting)[:2] == ["last", "b0"]


def test_a_budget_that_ends_in_the_queue_is_told() -> None:
    waiting = JobQueue()
    waiting.join(job("short", budget_s=5.0))
    waiting.join(job("long", budget_s=50.0))
    waiting.join(job("gone", budget_s=5.0))
    waiting.leave("gone")
    assert waiting.overdue(4.9) == []
    assert [found.job_id for found in waiting.overdue(5.0)] == ["short"]
    waiting.leave("short")
    assert waiting.overdue(6.0) == []


Steps = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "serve", "leave"]),
        st.sampled_from("abc"),
        st.sampled_from([INTERACTIVE, BATCH]),
        st.floats(0, 20),
    ),
    max_size=60,
)


def test_batch_jobs_that_age_together_keep_their_order() -> None:
    waiting = JobQueue()
    for name in ("j9", "j10"):
        waiting.join(job(name, priority=BATCH, since_s=0.0))
    assert waiting.next(AGEING_S) == NextJob(job("j9", priority=BATCH, since_s=0.0), yields=False)


@given(Steps)
def test_every_job_is_served_once_in_its_flows_order_and_never_none_while_one_waits(steps: list) -> None:  # type: ignore[type-arg]  # as drawn
    waiting, inside, now = JobQueue(), dict[str, QueuedJob](), 0.0
    for number, (step, tenant, priority, later_s) in enumerate(steps):
        now += later_s
        if step == "join":
            inside[f"j{number}"] = job(f"j{number}", tenant, priority, since_s=now, rows=1 + number % 3)
            waiting.join(inside[f"j{number}"])
        elif step == "leave" and inside:
            name = list(inside)[number % len(inside)]
            assert waiting.leave(name) == inside.pop(name)
        elif step == "serve" and inside:
            turn = present(waiting.next(now))
            flow = [name for name, other in inside.items() if other.flow == turn.job.flow]
            assert turn.job.job_id == flow[0]
            if turn.job.priority is BATCH and turn.yields:
                assert all(other.priority is BATCH for other in inside.values())
                assert all(other.since_s + AGEING_S > now for other in inside.values())
            waiting.serve(turn)
            del inside[turn.job.job_id]
        assert len(waiting) == len(inside)
        assert waiting.rows == sum(other.rows for other in inside.values())
        assert waiting.steps == sum(10 * other.rows for other in inside.values())
    assert sorted(rest(waiting, now)) == sorted(inside)
    assert waiting.next(now) is None


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=5), st.lists(st.integers(1, 4), min_size=5, max_size=5)
)
def test_tenants_that_wait_get_shares_by_weight(jobs: list[int], weights: list[int]) -> None:
    """At any moment two waiting tenants' work over weight differs by no more than the largest job of each."""
    waiting, left = JobQueue(), dict(enumerate(jobs))
    for tenant, number in enumerate(jobs):
        for i in range(number):
            waiting.join(job(f"{tenant}-{i}", str(tenant), weight=weights[tenant]))
    given = dict.fromkeys(left, 0.0)
    while all(left.values()):
        tenant = int(serve(waiting).split("-")[0])
        left[tenant] -= 1
        given[tenant] += 10 / weights[tenant]
        assert max(given.values()) - min(given.values()) <= 2 * 10 + 1e-9


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 64))
def test_the_window_holds_what_the_fleet_computes_and_as_much_again(
    workers: int, capacity: int, prepared: int
) -> None:
    window, waiting, carried = InFlightJobWindow(prepared), JobQueue(), 0
    window.resize(workers * capacity)
    for i in range(2 * workers * capacity + prepared):
        waiting.join(job(f"j{i}"))
    while (turn := waiting.next(0)) is not None and window.has_room(turn):
        waiting.serve(turn)
        window.begin(turn)
        carried += turn.job.rows
    assert carried == window.rows
    assert carried >= max(2 * workers * capacity, workers * capacity + prepared)


def test_a_tenant_within_its_share_exceeds_a_window_that_another_fills() -> None:
    window = InFlightJobWindow(4)
    for number in range(4):
        window.begin(NextJob(job(f"a{number}", "alice"), yields=False))
    assert not window.has_room(NextJob(job("a5", "alice"), yields=False))
    assert not window.has_room(NextJob(job("b", "bob", priority=BATCH), yields=True))
    for number in range(2):
        turn = NextJob(job(f"b{number}", "bob"), yields=False)
        assert window.has_room(turn)
        window.begin(turn)
    assert not window.has_room(NextJob(job("b3", "bob"), yields=False))


def test_batch_jobs_in_the_window_hold_up_no_interactive_one_and_aged_ones_are_not_held_up() -> None:
    window, waiting = InFlightJobWindow(2), JobQueue()
    jobs = [job(f"batch{i}", priority=BATCH) for i in range(3)]
    for one in jobs:
        waiting.join(one)
    for _ in range(2):
        turn = present(waiting.next(0))
        assert window.has_room(turn)
        waiting.serve(turn)
        window.begin(turn)
    third = present(waiting.next(0))
    assert not window.has_room(third)
    waiting.join(job("now"))
    turn = present(waiting.next(0))
    assert window.has_room(turn)
    waiting.serve(turn)
    window.begin(turn)
    assert not window.has_room(third)
    aged = present(waiting.next(AGEING_S))
    assert window.has_room(aged)
    for one in (*jobs, turn.job):
        window.end(one)
        window.end(replace(one))
    assert window.has_room(third)


MANY = 1000


def test_tenants_that_come_once_are_forgotten_while_another_always_waits() -> None:
    shares, most = FairShares[str](), 0
    shares.join("lasting", 1.0)
    for number in range(MANY):
        shares.join(f"t{number}", 1.0)
        shares.charge(f"t{number}", 10.0)
        shares.leave(f"t{number}")
        if number % 4 == 3:
            shares.charge("lasting", 10.0)
        most = max(most, len(shares))
    assert most < MANY / 5


def test_a_tenant_that_comes_and_goes_unserved_is_noted_once() -> None:
    shares = FairShares[str]()
    shares.join("lasting", 1.0)
    shares.join("fickle", 1.0)
    for _ in range(2):
        shares.charge("lasting", 10.0)
        shares.charge("fickle", 100.0)
        for _ in range(MANY):
            shares.leave("fickle")
            shares.join("fickle", 1.0)
    shares.leave("fickle")
    assert len(shares) < MANY / 5


class Oracle:
    """The rule, word by word: every tag is kept for ever, and the first is looked for among all."""

    def __init__(self) -> None:
        self.virtual, self.turn = 0.0, 0
        self.tags: dict[str, tuple[float, int]] = {}
        self.jobs: dict[str, int] = {}
        self.weights: dict[str, float] = {}

    def first(self) -> str | None:
        return min(self.jobs, key=lambda tenant: self.tags[tenant], default=None)

    def set(self, tenant: str, tag: float) -> None:
        self.turn += 1
        self.tags[tenant] = tag, self.turn

    def join(self, tenant: str, weight: float) -> None:
        if tenant not in self.jobs:
            self.virtual = max(
                [self.virtual, *([min(self.tags[t][0] for t in self.jobs)] if self.jobs else [])]
            )
            self.set(tenant, max(self.virtual, self.tags.get(tenant, (0.0, 0))[0]))
        self.jobs[tenant] = self.jobs.get(tenant, 0) + 1
        self.weights[tenant] = weight

    def leave(self, tenant: str) -> None:
        self.jobs[tenant] -= 1
        if not self.jobs[tenant]:
            del self.jobs[tenant]

    def charge(self, tenant: str, work: float) -> None:
        self.virtual += work / sum(self.weights[other] for other in self.jobs)
        self.set(tenant, self.tags[tenant][0] + work / self.weights[tenant])


tenants = "".join(map(chr, range(97, 97 + 26)))
more_moves = st.lists(
    st.tuples(
        st.sampled_from(tenants), st.sampled_from(["join", "join", "serve", "leave"]), st.integers(1, 50)
    ),
    max_size=400,
)


@given(more_moves, st.sampled_from([(1.0, 1.0), (1.0, 2.0), (0.5, 4.0)]))
def test_it_is_the_rule_word_by_word(done: list[tuple[str, str, int]], weights: tuple[float, float]) -> None:
    shares, oracle = FairShares[str](), Oracle()
    for tenant, what, work in done:
        if what == "join":
            weight = weights[ord(tenant) % 2]
            shares.join(tenant, weight)
            oracle.join(tenant, weight)
        elif what == "leave" and tenant in oracle.jobs:
            shares.leave(tenant)
            oracle.leave(tenant)
        elif what == "serve" and (first := oracle.first()) is not None:
            shares.charge(first, work)
            oracle.charge(first, work)
            shares.leave(first)
            oracle.leave(first)
        for other in oracle.jobs:
            assert shares.tag(other) == pytest.approx(oracle.tags[other][0])
        found, expected = shares.first(), oracle.first()
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:  # rounding may decide between equal tags
            assert shares.tag(found) == pytest.approx(shares.tag(expected))


# Which rows give way: those of the tenant that has most, to one that has fewer and finds no room.


class Scene:
    """One worker with four places, and who has them."""

    def __init__(self, **tenants: int) -> None:
        self.placement, self.line = Placement(), FairQueue()
        self.placement.observe(worker("d1"), 0)
        self.claims: dict[Attempt, SchedulingParams] = {}
        for tenant, rows in tenants.items():
            for number in range(rows):
                self.give(f"{tenant}{number}", SchedulingParams(tenant=tenant))

    def give(self, job: str, claim: SchedulingParams) -> None:
        self.placement.assign(job, 1, "d1", DEMAND, 0)
        self.claims[job, 1] = claim

    def asked(self, claim: SchedulingParams, now: float = 0.0) -> Attempt | None:
        key = self.line.join("waits", DEMAND, claim, 0).key
        try:
            return find_yielding_attempt(self.line, self.placement, self.claims, now)
        finally:
            self.line.leave(key)


def test_the_first_row_of_the_tenant_that_has_most_gives_way() -> None:
    scene = Scene(alice=3, bob=1)
    assert scene.asked(SchedulingParams(tenant="carol")) == ("alice0", 1)
    assert scene.asked(SchedulingParams(tenant="bob")) == ("alice0", 1)


def test_nobody_gives_way_to_who_would_have_more_than_the_others() -> None:
    scene = Scene(alice=2, bob=2)
    assert scene.asked(SchedulingParams(tenant="alice")) is None
    assert scene.asked(SchedulingParams(tenant="bob")) is None
    assert scene.asked(SchedulingParams(tenant="carol")) is not None


def test_nobody_gives_way_while_there_is_room() -> None:
    assert Scene(alice=3).asked(SchedulingParams(tenant="carol")) is None


@pytest.mark.parametrize(("token_ms", "gives_way"), [(0.01, None), (10.0, ("alice0", 1))])
def test_nobody_gives_way_where_a_row_ends_soon(token_ms: float, gives_way: Attempt | None) -> None:
    scene = Scene(alice=4)
    shown = worker("d1", *(row(f"alice{number}", 0, 10) for number in range(4)))
    scene.placement.observe(telling(shown, blocks=plain(1), cost_model=worker_costs(0.0, 0.0, token_ms)), 1)
    assert scene.asked(SchedulingParams(tenant="carol")) == gives_way


def test_weights_decide_who_has_more() -> None:
    scene = Scene()
    for number in range(4):
        scene.give(f"alice{number}", SchedulingParams(tenant="alice", weight=8.0))
    assert scene.asked(SchedulingParams(tenant="bob", weight=1.0)) is None
    assert scene.asked(SchedulingParams(tenant="bob", weight=4.0)) == ("alice0", 1)


def test_interactive_rows_give_way_to_a_batch_job_that_has_waited() -> None:
    scene = Scene(alice=4)
    assert scene.asked(SchedulingParams(BATCH, "bob"), AGEING_S - 1) is None
    assert scene.asked(SchedulingParams(BATCH, "bob"), AGEING_S) == ("alice0", 1)


def test_batch_rows_give_way_to_another_tenant_s_batch_job() -> None:
    scene = Scene()
    for number in range(4):
        scene.give(f"alice{number}", SchedulingParams(BATCH, "alice"))
    assert scene.asked(SchedulingParams(BATCH, "bob")) == ("alice0", 1)
