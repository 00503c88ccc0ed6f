"""What Prometheus is told of ControlNet services."""

from __future__ import annotations

from giornata.wire.controlnets import ControlState
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.metrics import control_metrics

TOLD = ControlState(
    capacity_rows=64,
    rows=1,
    resident=("d1",),
    resident_bytes=2,
    hits=3,
    misses=4,
    evicted=5,
    steps_total=6,
    late_total=7,
    work_ms=8.0,
    pending_ms=9.0,
)


def test_every_counter_of_an_instance_is_told_once() -> None:
    state = ServiceState(
        service=ServiceName.CONTROLNET, instance="c1", host="h", version="1", ready=True, control=TOLD
    )
    others = [state.model_copy(update={"instance": "gateway", "control": None})]
    told = {
        (family.name.removeprefix("giornata_control_"), *sample.labels.values()): sample.value
        for family in control_metrics([state, *others])
        for sample in family.samples
    }
    assert told == {
        ("rows", "c1"): 1,
        ("resident_bytes", "c1"): 2,
        ("opened_rows", "c1", "resident"): 3,
        ("opened_rows", "c1", "loaded"): 4,
        ("evictions", "c1"): 5,
        ("steps", "c1", "computed"): 6,
        ("steps", "c1", "late"): 7,
        ("pending_seconds", "c1"): 0.009,
    }
