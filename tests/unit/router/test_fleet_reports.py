"""What telemetry and the fleet's summary tell of workers: their speeds, waits in two digits, and whom to ask."""

from __future__ import annotations

import pytest

from giornata.wire.workers import ServiceName, ServiceState, StepSample
from giornata_router.fleet_reports import SAMPLES_S, WINDOW_S, StepRates, coarse, report, summary
from tests.unit.scheduling.test_placement import row, telling, worker

STEP = StepSample(
    rows=1, sequences=1, image_tokens=1, text_tokens=1, attention_pairs=1, assemble_ms=0.0, step_ms=0.0
)


def counted(steps_total: int, *steps_ms: float) -> ServiceState:
    samples = tuple(STEP.model_copy(update={"step_ms": ms}) for ms in steps_ms)
    return telling(worker("d1"), steps_total=steps_total, samples=samples)


def test_steps_per_second_are_those_of_the_last_seconds() -> None:
    rates = StepRates()
    assert rates.steps_per_s("d1") is None, "it was never heard"
    rates.observe(counted(100), 10.0)
    assert rates.steps_per_s("d1") is None, "it was heard once"
    rates.observe(counted(101), 10.25)
    assert rates.steps_per_s("d1") is None, "too short a time says nothing"
    rates.observe(counted(110), 12.0)
    assert rates.steps_per_s("d1") == 5.0
    rates.observe(counted(160), 10.25 + WINDOW_S)
    assert rates.steps_per_s("d1") == pytest.approx(59 / WINDOW_S)
    rates.keep(["d2"])
    assert rates.steps_per_s("d1") is None


def test_a_step_takes_the_median_of_the_last_minute_in_which_it_had_rows() -> None:
    rates = StepRates()
    assert rates.step_ms("d1", 0.0) is None
    rates.observe(counted(3, 100.0, 300.0, 200.0), 0.0)
    rates.observe(counted(4, 700.0), 10.0)
    assert rates.step_ms("d1", SAMPLES_S) == 250.0
    assert rates.step_ms("d1", SAMPLES_S + 1.0) == 700.0
    assert rates.step_ms("d1", SAMPLES_S + 11.0) is None


def test_a_report_counts_rows_and_leaves_their_lists_out() -> None:
    state = worker("d1", row("a", 0, 10), row("b", 0, 10))
    told = report(state, StepRates(), 0.0)
    assert (told.running_rows, told.waiting_rows, told.steps_per_s, told.step_ms) == (2, 0, None, None)
    assert told.state.worker is not None
    assert told.state.worker.running == ()


@pytest.mark.parametrize(
    ("wait_ms", "told_ms"),
    [
        (0.0, 0.0),
        (9.99, 0.0),
        (10.0, 10.0),
        (10.4, 10.0),
        (99.4, 99.0),
        (104.0, 100.0),
        (1250.1, 1300.0),
        (98765.0, 99000.0),
    ],
)
def test_waits_have_two_digits(wait_ms: float, told_ms: float) -> None:
    assert coarse(wait_ms) == told_ms


def test_a_summary_names_two_gateways_that_take_requests() -> None:
    """Enough to know whether a gateway is the only one: a large fleet's names would be told again and again."""
    gateways = [
        worker(f"g{number}").model_copy(
            update={"service": ServiceName.GATEWAY, "worker": None, "draining": number == 0}
        )
        for number in range(4)
    ]
    told = summary("r", [worker("d1"), *gateways], wait_ms={"m": 1234.0})
    assert told.gateways == ("g1", "g2")
    assert told.ready == {ServiceName.DENOISER: 1, ServiceName.GATEWAY: 3}
    assert told.wait_ms == {"m": 1200.0}
