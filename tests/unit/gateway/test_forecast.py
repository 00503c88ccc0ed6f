"""How fast workers are and how long a picture would wait: from what was told, and unknown where it was not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.workers import QueueState, RowProgress, ServiceName, ServiceState, StepSample, WorkerState
from giornata_gateway.views.fleet import fleet_view
from giornata_gateway.views.forecast import SAMPLES_S, WINDOW_S, Load, Pace, predicted_wait_s
from tests.fakes.fleet import CARD

EMPTY = QueueState()


def row(left: int, index: int = 0) -> RowProgress:
    return RowProgress(job_id="j", attempt=1, index=index, step=10, steps=10 + left, tokens=16)


def worker(
    *running: int,
    waiting: tuple[int, ...] = (),
    capacity: int = 2,
    total: int = 0,
    step_ms: float | None = None,
) -> WorkerState:
    """Rows by the steps they have left; one sample of `step_ms`."""
    samples: tuple[StepSample, ...] = ()
    if step_ms is not None:
        samples = (
            StepSample(
                rows=1,
                sequences=1,
                image_tokens=1,
                text_tokens=1,
                attention_pairs=1,
                assemble_ms=0,
                step_ms=step_ms,
            ),
        )
    return WorkerState(
        capacity_rows=capacity,
        capacity_tokens=99,
        running=tuple(row(left, i) for i, left in enumerate(running)),
        waiting=tuple(row(left, i) for i, left in enumerate(waiting)),
        steps_total=total,
        samples=samples,
    )


def denoiser(state: WorkerState, instance: str = "d1", digest: str = CARD.digest) -> ServiceState:
    card = CARD.model_copy(update={"digest": digest})
    return ServiceState(
        service=ServiceName.DENOISER,
        instance=instance,
        host="h",
        version="1",
        ready=True,
        models=(card,),
        worker=state,
    )


def router(queue: QueueState | None, *, active: bool = True) -> ServiceState:
    return ServiceState(
        service=ServiceName.ROUTER,
        instance="r1",
        host="h",
        version="1",
        ready=True,
        active=active,
        queue=queue,
    )


def test_steps_are_counted_over_the_last_seconds() -> None:
    pace = Pace()
    for tick in range(41):  # ten seconds at 4 Hz: ten steps a second, then none
        pace.observe(denoiser(worker(5, total=min(tick, 20) * 10 // 4)), tick / 4)
    assert pace.steps_per_s("d1") == pytest.approx(0)
    pace.observe(denoiser(worker(5, total=60)), 10.25)
    assert pace.steps_per_s("d1") == pytest.approx(10 / WINDOW_S, rel=0.1)


def test_a_pace_is_unknown_until_it_was_watched_for_a_while() -> None:
    pace = Pace()
    assert pace.steps_per_s("d1") is None
    pace.observe(denoiser(worker(total=1000)), 1.0)
    assert pace.steps_per_s("d1") is None  # not a thousand steps in no time
    pace.observe(denoiser(worker(total=1004)), 3.0)
    assert pace.steps_per_s("d1") == 2
    pace.forget("d1")
    assert pace.steps_per_s("d1") is None


def test_a_step_takes_the_median_of_recent_ones() -> None:
    pace = Pace()
    for now, step_ms in enumerate((10, 500, 12, 11)):
        pace.observe(denoiser(worker(5, step_ms=step_ms)), float(now))
    assert pace.step_ms("d1", 3.0) == 11.5
    assert pace.step_ms("d1", 2.0 + SAMPLES_S) == 11.5
    assert pace.step_ms("d1", 2.5 + SAMPLES_S) == 11
    assert pace.step_ms("d1", 4.0 + SAMPLES_S) is None


@pytest.mark.parametrize(
    ("loads", "queue", "expected"),
    [
        ([], EMPTY, None),
        ([Load(worker(), None)], None, None),
        ([Load(worker(), None)], QueueState(full=True), None),
        ([Load(worker(), None)], EMPTY, 0),
        ([Load(worker(9), 100)], EMPTY, 0),
        ([Load(worker(9, 5), 100)], EMPTY, 0.5),
        ([Load(worker(9, 5), None)], EMPTY, None),
        ([Load(worker(9, 5, waiting=(2,)), 100)], EMPTY, 0.7),
        ([Load(worker(9, 5), 100), Load(worker(3, 8), 50)], EMPTY, 0.15),
        ([Load(worker(9, 5), 100)], QueueState(jobs=1, rows=2, steps=12), 0.9 + 0.2),
        ([Load(worker(), None)], QueueState(jobs=1, rows=2, steps=12), None),
    ],
    ids=[
        "no worker", "no router", "uncounted jobs", "idle", "a place is free", "first to leave", "pace unknown",
        "behind a waiting row", "the sooner of two workers", "behind the queue", "queue before an unknown pace",
    ],
)  # fmt: skip
def test_the_wait_is_that_of_a_simulation(
    loads: list[Load], queue: QueueState | None, expected: float | None
) -> None:
    assert predicted_wait_s(loads, queue) == (None if expected is None else pytest.approx(expected))


steps = st.lists(st.integers(1, 50), max_size=8)


@given(steps, steps, st.integers(1, 8), st.integers(0, 20), st.floats(1, 500))
def test_more_work_ahead_is_never_a_shorter_wait(
    running: list[int], waiting: list[int], capacity: int, queued: int, step_ms: float
) -> None:
    def wait(queue: int) -> float:
        load = Load(worker(*running[:capacity], waiting=tuple(waiting), capacity=capacity), step_ms)
        predicted = predicted_wait_s([load], QueueState(jobs=queue, rows=queue, steps=10 * queue))
        assert predicted is not None
        return predicted

    assert 0 <= wait(queued) <= wait(queued + 1)
    left = sum(running[:capacity]) + sum(waiting) + 10 * queued
    assert wait(queued) <= left * step_ms / 1000 + 1e-9  # never longer than one after another


def test_the_fleet_is_summed_up() -> None:
    pace = Pace()
    states = [
        denoiser(worker(5, 9, waiting=(3,), capacity=4, total=40, step_ms=20)),
        router(QueueState(jobs=2, rows=3)),
    ]
    pace.observe(denoiser(worker(5, total=20)), 0.0)
    pace.observe(states[0], 2.0)
    view = fleet_view(states, pace, 2.0)
    assert (view.workers, view.running_rows, view.waiting_rows, view.free_rows) == (1, 2, 1, 1)
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s) == (2, 3, 10)
    first = view.instances[0].worker
    assert first is not None
    assert (first.step_ms, first.steps_per_s, first.capacity_rows) == (20, 10, 4)
    assert view.instances[1].worker is None


def test_what_nobody_told_is_unknown() -> None:
    view = fleet_view([denoiser(worker()), router(None, active=False)], Pace(), 0.0)
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s, view.predicted_wait_s) == (None,) * 4
    two_models = [denoiser(worker()), denoiser(worker(), "d2", "e" * 64), router(EMPTY)]
    assert fleet_view(two_models, Pace(), 0.0).predicted_wait_s is None
    assert fleet_view([*two_models[:1], router(EMPTY)], Pace(), 0.0).predicted_wait_s == 0
