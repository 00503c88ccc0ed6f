"""How fast workers are, and what the fleet does together: from telemetry, and unknown without it."""

from __future__ import annotations

import pytest

from giornata.fleet import COUNTED_S, SILENCE_S
from giornata.wire.workers import QueueState, RowProgress, ServiceName, ServiceState, StepSample, WorkerState
from giornata_gateway.fleet import FleetListener
from giornata_gateway.views.fleet import SAMPLES_S, WINDOW_S, StepRates, fleet_view
from tests.fakes.fleet import CARD

EMPTY = QueueState(wait_ms=0.0)


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
    rates = StepRates()
    for tick in range(41):  # ten seconds at 4 Hz: ten steps a second, then none
        rates.observe(denoiser(worker(5, total=min(tick, 20) * 10 // 4)), tick / 4)
    assert rates.steps_per_s("d1") == pytest.approx(0)
    rates.observe(denoiser(worker(5, total=60)), 10.25)
    assert rates.steps_per_s("d1") == pytest.approx(10 / WINDOW_S, rel=0.1)


def test_a_rate_is_unknown_until_it_was_watched_for_a_while() -> None:
    rates = StepRates()
    assert rates.steps_per_s("d1") is None
    rates.observe(denoiser(worker(total=1000)), 1.0)
    assert rates.steps_per_s("d1") is None  # not a thousand steps in no time
    rates.observe(denoiser(worker(total=1004)), 3.0)
    assert rates.steps_per_s("d1") == 2
    rates.forget("d1")
    assert rates.steps_per_s("d1") is None


def test_a_step_takes_the_median_of_recent_ones() -> None:
    rates = StepRates()
    for now, step_ms in enumerate((10, 500, 12, 11)):
        rates.observe(denoiser(worker(5, step_ms=step_ms)), float(now))
    assert rates.step_ms("d1", 3.0) == 11.5
    assert rates.step_ms("d1", 2.0 + SAMPLES_S) == 11.5
    assert rates.step_ms("d1", 2.5 + SAMPLES_S) == 11
    assert rates.step_ms("d1", 4.0 + SAMPLES_S) is None


def test_the_fleet_is_summed_up() -> None:
    rates = StepRates()
    states = [
        denoiser(worker(5, 9, waiting=(3,), capacity=4, total=40, step_ms=20)),
        router(QueueState(jobs=2, rows=3, wait_ms=1250.0)),
    ]
    rates.observe(denoiser(worker(5, total=20)), 0.0)
    rates.observe(states[0], 2.0)
    view = fleet_view(states, rates, 2.0)
    assert (view.workers, view.running_rows, view.waiting_rows, view.free_rows) == (1, 2, 1, 1)
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s) == (2, 3, 10)
    assert view.predicted_wait_s == 1.25, "as the router tells it"
    first = view.instances[0].worker
    assert first is not None
    assert (first.step_ms, first.steps_per_s, first.capacity_rows) == (20, 10, 4)
    assert view.instances[1].worker is None


def test_what_nobody_told_is_unknown() -> None:
    view = fleet_view([denoiser(worker()), router(None, active=False)], StepRates(), 0.0)
    assert (view.queued_jobs, view.queued_rows, view.steps_per_s, view.predicted_wait_s) == (None,) * 4
    unknown = [denoiser(worker()), router(QueueState(jobs=1))]
    assert fleet_view(unknown, StepRates(), 0.0).predicted_wait_s is None
    assert fleet_view([denoiser(worker()), router(EMPTY)], StepRates(), 0.0).predicted_wait_s == 0


def test_an_instance_is_gone_when_it_was_silent_for_long_enough_while_the_gateway_listened() -> None:
    fleet = FleetListener(bridged_s=0)
    fleet.clock.tick(0.0)
    fleet.hear(denoiser(worker()))
    fleet.clock.tick(60.0)  # the gateway stood still
    fleet.look()
    assert [state.instance for state in fleet.states()] == ["d1"]
    for second in range(int(SILENCE_S / COUNTED_S) + 1):
        fleet.clock.tick(61.0 + second)
    fleet.look()
    assert fleet.states() == []
