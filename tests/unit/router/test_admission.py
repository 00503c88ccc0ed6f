"""Which jobs are accepted, when they will have their pictures, and how the file store is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import Fleet
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import FairQueue, JobQueue, QueuedJob, RowQueue, SchedulingParams
from giornata.wire import subjects
from giornata.wire.errors import (
    BatchQueueFull,
    InteractiveQueueFull,
    InternalError,
    QueueFull,
    QueueTooLong,
    TenantQueueFull,
)
from giornata.wire.jobs import Priority
from giornata.wire.workers import QueueState, ServiceState, StoreRoom
from giornata_lab.bench.systems.networks import plain
from giornata_router.admission import FinishTimeEstimator, QueueLimiter, may_come
from giornata_router.prepost import PrepostStage, StageCost, StagePlacement, Verb
from giornata_tools.launcher.plan import MAX_FILE_STORE
from tests.contract.messages import JOB
from tests.fakes.fleet import CARD, worker_costs
from tests.present import present
from tests.unit.router.test_prepost import prepost
from tests.unit.scheduling.test_placement import DEMAND, telling, worker

STEPS = 10
STEP_MS = 160.0
"""Time of a step of one row of :data:`DEMAND`: 16 tokens at 10 ms each."""


def job(
    name: str,
    *,
    n: int = 1,
    priority: Priority = Priority.INTERACTIVE,
    budget_ms: int = 100_000,
    tenant: str = "default",
) -> QueuedJob:
    parameters = JOB.parameters.model_copy(update={"n": n, "num_inference_steps": STEPS, "strength": 1.0})
    changed = {
        "job_id": name,
        "model": CARD.name,
        "model_digest": CARD.digest,
        "priority": priority,
        "budget_ms": budget_ms,
        "evaluations": STEPS,
        "parameters": parameters,
        "tenant": tenant,
    }
    return QueuedJob.of(JOB.model_copy(update=changed), 0)


def known(state: ServiceState) -> ServiceState:
    return telling(state, blocks=plain(1), cost_model=worker_costs(0.0, 0.0, 10.0))


def forecasting(
    *states: ServiceState, prepost: StagePlacement | None = None
) -> tuple[FinishTimeEstimator, Placement, RowQueue]:
    placement, line = Placement(), FairQueue()
    for state in states:
        placement.observe(state, 0)
    made = FinishTimeEstimator(placement, line, prepost)
    made.learn(DEMAND)
    return made, placement, line


def wait_s(placement: Placement, line: RowQueue, asked: QueuedJob, waiting: int = 0) -> tuple[int, float]:
    """Jobs before it and about how long it would wait, found by asking with ever smaller budgets."""
    for limit_s in (tenths / 10 for tenths in range(100, 0, -1)):
        made = FinishTimeEstimator(placement, line)
        made.learn(DEMAND)
        try:
            made.admit(replace(asked, budget_s=limit_s), waiting)
        except QueueTooLong as refused:
            return int(str(refused.received).split()[0]), limit_s
    return 0, 0.0


def test_what_comes_before_is_waited_for() -> None:
    made, placement, line = forecasting(known(worker("d1")))
    assert wait_s(placement, line, job("a")) == (0, 0.0)
    line.join("w", DEMAND, SchedulingParams(), 0)
    before, seconds = wait_s(placement, line, job("b"), 1)
    assert before == 2
    assert seconds == pytest.approx(2 * STEPS * STEP_MS / 1e3, abs=0.11)
    placement.assign("w", 1, "d1", DEMAND, 0)
    line.leave(next(iter(line)).key)
    running = present(made.of(job("w"), 0, None))
    assert running.position == 0
    assert running.finish_ms == pytest.approx(STEPS * STEP_MS)


def test_jobs_that_are_prepared_are_waited_for_until_they_are_in_the_line() -> None:
    made, _, line = forecasting(known(worker("d1")))
    made.begin(job("p", budget_ms=2500))
    made.begin(job("q", priority=Priority.BATCH, budget_ms=2500))
    made.admit(job("a", budget_ms=2500), 0)  # 1.6 s
    with pytest.raises(QueueTooLong, match="2 jobs before it"):
        made.admit(job("b", priority=Priority.BATCH, budget_ms=2500), 0)
    line.join("p", DEMAND, SchedulingParams(), 0)
    made.prepared("p")
    made.admit(job("a", budget_ms=2500), 0)
    with pytest.raises(QueueTooLong):
        made.admit(job("a", budget_ms=2500), 1)
    made.prepared("q")
    made.prepared("q")
    made.admit(job("b", priority=Priority.BATCH, budget_ms=2500), 0)


def test_the_queue_of_a_tenant_is_no_reason_to_refuse_another() -> None:
    made, _, _ = forecasting(known(worker("d1")))
    waiting = JobQueue()
    for i in range(100):
        waiting.join(job(f"w{i}", tenant="many", budget_ms=5000))
    more, other = job("a", tenant="many", budget_ms=5000), job("b", tenant="few", budget_ms=5000)
    with pytest.raises(QueueTooLong):
        made.admit(more, waiting.ahead(more))
    made.admit(other, waiting.ahead(other))


def test_batch_jobs_do_not_come_before_interactive_ones() -> None:
    _, placement, line = forecasting(known(worker("d1")))
    line.join("w", DEMAND, SchedulingParams(Priority.BATCH), 0)
    assert wait_s(placement, line, job("a"))[0] == 0
    assert wait_s(placement, line, job("b", priority=Priority.BATCH))[0] == 1


def test_an_edit_that_would_wait_too_long_is_refused_with_the_time_after_which_it_would_not() -> None:
    made, _, line = forecasting(known(worker("d1")))
    for i in range(4):
        line.join(f"w{i}", DEMAND, SchedulingParams(), 0)
    with pytest.raises(QueueTooLong) as refused:
        made.admit(job("a", budget_ms=5000), 0)
    assert refused.value.retry_after_s == 2  # 4 jobs of 1.6 s are 6.4 s
    assert refused.value.status == 429
    with pytest.raises(QueueTooLong):
        forecasting(known(worker("d1")))[0].admit(job("b", budget_ms=1500), 1)


def test_an_edit_for_which_there_is_a_place_is_not_refused_for_the_work_of_those_beside_it() -> None:
    made, placement, _ = forecasting(known(worker("d1", capacity=2)))
    placement.assign("w", 1, "d1", DEMAND, 0)
    made.admit(job("a", budget_ms=1000), 0)
    with pytest.raises(QueueTooLong):
        made.admit(job("b", n=2, budget_ms=1000), 0)


def test_an_edit_is_not_refused_for_what_it_may_take_itself() -> None:
    made, _, _ = forecasting(known(worker("d1")))
    made.admit(job("a", n=4, budget_ms=1000), 0)
    forecast = present(made.of(job("a", n=4, budget_ms=1000), 0, 0))
    assert forecast.finish_ms == pytest.approx(4 * STEPS * STEP_MS)


def test_who_waits_is_told_its_place() -> None:
    made, _, line = forecasting(known(worker("d1")))
    for i in range(3):
        line.join(f"w{i}", DEMAND, SchedulingParams(), 0)
    told = [made.of(job(f"w{i}"), 1, None) for i in range(3)]
    assert [t.position for t in told if t] == [0, 1, 2]
    assert [t.finish_ms for t in told if t] == pytest.approx([STEPS * STEP_MS * k for k in (1, 2, 3)])
    unplaced = present(made.of(job("new"), 1, 0))
    assert unplaced.position == 3
    assert made.of(job("unknown"), 1, None) is None


def test_encoding_and_decoding_are_foretold_from_what_they_took() -> None:
    stages, denoise_ms = StagePlacement(Fleet()), STEPS * STEP_MS
    made, placement, line = forecasting(known(worker("d1")), prepost=stages)
    took: dict[Verb, StageCost] = {
        "inspect": StageCost(images_ms=1500), "encode": StageCost(model_ms=500), "finish": StageCost(300, 200)
    }  # fmt: skip
    for verb, cost in took.items():
        stages.costs.observe(verb, DEMAND.model_digest, "default", 1.0, cost)
    line.join("w", DEMAND, SchedulingParams(), 0)
    fresh, waiting = present(made.of(job("new"), 1, 0)), made.of(job("w"), 1, None)
    assert fresh.finish_ms == pytest.approx(max(2000.0 + denoise_ms, 2 * denoise_ms) + 500.0)
    assert present(waiting).finish_ms == pytest.approx(denoise_ms + 500.0)
    placement.assign("w", 1, "d1", DEMAND, 0)
    line.leave(next(iter(line)).key)
    running = present(made.of(job("w"), 1, None))
    assert running.finish_ms == pytest.approx(denoise_ms + 500.0)
    placement.release("w", 1)
    decoded = JOB.model_copy(update={"job_id": "w", "model_digest": DEMAND.model_digest})
    with made.finishing(decoded, 10.0):
        left = [made.of(job("w"), now, None) for now in (10.2, 11.0)]
    assert [one and (one.position, one.finish_ms) for one in left] == [(0, pytest.approx(300.0)), (0, 0.0)]
    assert made.of(job("w"), 10.2, None) is None


def test_a_picture_ends_later_while_its_decoding_waits_for_room() -> None:
    fleet = Fleet()
    fleet.observe(prepost("p1", processes=1), 0.0)
    stages = StagePlacement(fleet)
    stages.observe(prepost("p1", processes=1))
    made, _, _ = forecasting(known(worker("d1")), prepost=stages)
    cost = StageCost(3000, 2000)
    stages.costs.observe("finish", CARD.digest, "default", 1.0, cost)
    decoded = JOB.model_copy(update={"job_id": "w", "model_digest": CARD.digest})
    asked = PrepostStage("finish", CARD.name, CARD.digest, cost)
    first = stages.join("first", asked, SchedulingParams(), 0.0)
    assert stages.place(0.0)[0] == [(first, "p1")]
    waits = stages.join("w", asked, SchedulingParams(), 0.0)
    assert stages.place(0.0)[0] == []
    with made.finishing(decoded, 0.0):
        wait_ms = stages.wait_ms(CARD.digest, job("w"))
        assert wait_ms > 0
        queued = made.of(job("w"), 0.0, None)
        stages.leave(first, 0.0)
        assert stages.place(0.0)[0] == [(waits, "p1")]
        begun = made.of(job("w"), 0.0, None)
    assert present(queued).finish_ms == pytest.approx(5000.0 + wait_ms)
    assert present(begun).finish_ms == pytest.approx(5000.0)


def test_a_job_that_failed_while_it_was_decoded_promises_no_picture() -> None:
    made, _, _ = forecasting(known(worker("d1")))
    decoded = JOB.model_copy(update={"job_id": "w", "model_digest": DEMAND.model_digest})

    def fail() -> None:
        with made.finishing(decoded, 10.0):
            assert made.of(job("w"), 10.0, None) is not None
            raise InternalError

    with pytest.raises(InternalError):
        fail()
    assert made.of(job("w"), 10.0, None) is None


def test_rows_that_wait_are_told_with_what_they_ask_for() -> None:
    made, _, line = forecasting()
    assert made.queue(JobQueue(), full=False) == QueueState()
    two = replace(DEMAND, shapes=DEMAND.shapes * 2)
    keys = [line.join(f"w{i}", demand, SchedulingParams(), 0).key for i, demand in enumerate((DEMAND, two))]
    rows, steps = DEMAND.rows + two.rows, DEMAND.steps + two.steps
    waiting = JobQueue()
    waiting.join(job("u", n=3))
    told = made.queue(waiting, full=True, unreadable=1)
    assert told == QueueState(jobs=3, rows=rows + 3, steps=steps + 3 * STEPS, full=True, unreadable=1)
    for key in keys:
        line.leave(key)
    assert made.queue(JobQueue(), full=False) == QueueState()


def test_telemetry_tells_how_long_one_more_picture_would_wait() -> None:
    made, placement, line = forecasting(known(worker("d1", capacity=1)))
    assert made.queue(JobQueue(), full=False).wait_ms == 0
    placement.assign("w", 1, "d1", DEMAND, 0)
    assert made.queue(JobQueue(), full=False).wait_ms == pytest.approx(STEPS * STEP_MS)
    line.join("v", replace(DEMAND, shapes=DEMAND.shapes * 2), SchedulingParams(), 0)
    assert made.queue(JobQueue(), full=False).wait_ms == pytest.approx(3 * STEPS * STEP_MS)
    waiting = JobQueue()
    waiting.join(job("u"))
    assert made.queue(waiting, full=True).wait_ms == pytest.approx(4 * STEPS * STEP_MS), (
        "jobs in the queue count"
    )


@given(rows=st.integers(1, 8), capacity=st.integers(1, 4), ahead=st.lists(st.integers(1, 4), max_size=5))
def test_more_work_ahead_is_never_a_shorter_wait(rows: int, capacity: int, ahead: list[int]) -> None:
    made, placement, line = forecasting(known(worker("d1", capacity=capacity)))
    placement.assign("w", 1, "d1", replace(DEMAND, shapes=DEMAND.shapes * rows), 0)
    told = [made.queue(JobQueue(), full=False).wait_ms]
    for number, more in enumerate(ahead):
        line.join(f"v{number}", replace(DEMAND, shapes=DEMAND.shapes * more), SchedulingParams(), 0)
        told.append(made.queue(JobQueue(), full=False).wait_ms)
    waits = [wait for wait in told if wait is not None]
    assert len(waits) == len(told)
    assert waits == sorted(waits)
    assert waits[-1] <= (rows + sum(ahead)) * STEPS * STEP_MS + 1e-6, "never longer than one after another"


def test_a_wait_that_is_unknown_is_not_told() -> None:
    idle = forecasting(worker("d1"))[0].queue(JobQueue(), full=False).wait_ms
    assert idle == 0, "there is a place, however fast it is"
    slow, placement, _ = forecasting(worker("d1", capacity=1))
    placement.assign("w", 1, "d1", DEMAND, 0)
    assert slow.queue(JobQueue(), full=False).wait_ms is None, "no worker has told what its steps cost"
    other = CARD.model_copy(update={"digest": "other"})
    two = forecasting(known(worker("d1")), known(worker("d2", models=(other,))))[0]
    assert two.queue(JobQueue(), full=False).wait_ms is None, "it is another for each model"
    fresh = FinishTimeEstimator(placement, FairQueue())
    placement.observe(known(worker("d1", capacity=1)), 0)
    assert fresh.queue(JobQueue(), full=False).wait_ms == pytest.approx(STEPS * STEP_MS, rel=0.01), (
        "no job was inspected"
    )


def test_nothing_is_promised_or_refused_before_anything_is_known() -> None:
    made, _, _ = forecasting(worker("d1"))
    made.admit(job("a", budget_ms=1), 0)  # no worker has told what its steps cost
    assert made.of(job("a", budget_ms=1), 0, 0) is None
    fresh = FinishTimeEstimator(Placement(), FairQueue())
    fresh.admit(job("a", budget_ms=1), 0)
    nobody, _, _ = forecasting()
    nobody.admit(job("a", budget_ms=1), 0)  # an absent fleet may come back


def small_job(tenant: str = "a", priority: Priority = Priority.INTERACTIVE) -> QueuedJob:
    return QueuedJob("j", priority, tenant, 1.0, "digest", 1, 10, 0.0, 60.0)


def places(share: float = 0.5) -> QueueLimiter:
    return QueueLimiter({Priority.INTERACTIVE: 4, Priority.BATCH: 8}, share)


@pytest.mark.parametrize(
    ("priority", "limit", "error"),
    [(Priority.INTERACTIVE, 4, InteractiveQueueFull), (Priority.BATCH, 8, BatchQueueFull)],
)
def test_each_priority_has_a_limit_of_its_own(priority: Priority, limit: int, error: type[QueueFull]) -> None:
    made = places(share=1.0)
    [other] = set(Priority) - {priority}
    for _ in range(limit):
        assert not made.full
        made.check(small_job("a", priority))
        made.take(small_job("a", priority))
    assert made.full
    with pytest.raises(error) as refused:
        made.check(small_job("b", priority))
    assert (refused.value.status, refused.value.accepted) == (429, f"at most {limit}")
    assert refused.value.retry_after_s
    made.check(small_job("b", other))
    made.give_back(small_job("a", priority))
    made.check(small_job("b", priority))


def test_one_tenant_never_fills_the_queue_for_others() -> None:
    made = places()
    for _ in range(2):
        made.check(small_job("a"))
        made.take(small_job("a"))
    with pytest.raises(TenantQueueFull) as refused:
        made.check(small_job("a"))
    assert (refused.value.status, refused.value.code) == (429, "tenant_queue_full")
    assert refused.value.accepted == "at most 2 of 4"
    made.check(small_job("a", Priority.BATCH))
    made.check(small_job("b"))
    made.give_back(small_job("a"))
    made.check(small_job("a"))


def test_however_small_its_share_a_tenant_has_one_place() -> None:
    made = places(share=0.01)
    made.check(small_job())
    made.take(small_job())
    with pytest.raises(TenantQueueFull):
        made.check(small_job())


DEPLOY = Path(__file__).parents[3] / "deploy"
RECORD_BYTES = 16 << 10
LIMIT = 1000 * RECORD_BYTES


@pytest.mark.parametrize(
    ("used", "unfinished", "comes"),
    [(0, 0, True), (0, 899, True), (0, 900, False), (800, 99, True), (800, 100, False), (1000, 0, False)],
)
def test_a_job_comes_while_all_before_it_can_write_their_ends(
    used: int, unfinished: int, comes: bool
) -> None:
    room = StoreRoom(store="s", used_bytes=used * RECORD_BYTES, limit_bytes=LIMIT)
    assert may_come(room, unfinished) is comes


@pytest.mark.parametrize("store_bytes", [subjects.LEAST_STORE_BYTES, subjects.STORE_BYTES])
def test_every_stream_has_a_share_of_the_file_store_and_all_fit(store_bytes: int) -> None:
    limits = subjects.limits(store_bytes)
    assert set(limits) == {subjects.JOBS, *subjects.STREAMS}
    in_memory = limits.pop(subjects.EVENTS)
    assert min(limits.values()) > 0
    free = (store_bytes - subjects.LEASE_BYTES) // 32  # what earlier versions have left there
    assert store_bytes - free - 16 <= sum(limits.values()) <= store_bytes - free
    assert in_memory <= 512 << 20


def test_the_default_fits_every_server_that_we_configure() -> None:
    told = [DEPLOY / "nats.conf", DEPLOY / "nats-cluster.conf"]
    sizes = [
        line.split()[1]
        for file in told
        for line in file.read_text().splitlines()
        if "max_file_store:" in line
    ]
    assert sizes
    assert {*sizes, MAX_FILE_STORE} == {"8GB"}
    assert subjects.STORE_BYTES < 8 << 30
