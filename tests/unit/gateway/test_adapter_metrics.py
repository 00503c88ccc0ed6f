"""What Prometheus is told of workers' LoRAs."""

from __future__ import annotations

from giornata.wire.workers import AdapterCounters, ServiceName, ServiceState
from giornata_gateway.metrics import adapter_metrics
from tests.contract.messages import WORKER

COUNTERS = AdapterCounters(
    hits_device=1,
    hits_memory=2,
    hits_disk=3,
    misses=4,
    prefetched=5,
    evicted_device=6,
    evicted_memory=7,
    evicted_disk=8,
    failed=9,
    paused=10,
    late=11,
    device_bytes=12,
    memory_bytes=13,
    disk_bytes=14,
)


def test_every_counter_of_a_worker_is_told_once() -> None:
    state = ServiceState(
        service=ServiceName.DENOISER,
        instance="d1",
        host="h",
        version="1",
        ready=True,
        worker=WORKER.model_copy(update={"adapters": COUNTERS}),
    )
    others = [
        state.model_copy(update={"instance": "gateway", "worker": None}),
        state.model_copy(update={"worker": WORKER.model_copy(update={"adapters": None})}),
    ]
    told = {
        (family.name.removeprefix("giornata_adapter_"), *sample.labels.values()): sample.value
        for family in adapter_metrics([state, *others])
        for sample in family.samples
    }
    assert told == {
        ("lookups", "d1", "device"): 1,
        ("lookups", "d1", "memory"): 2,
        ("lookups", "d1", "disk"): 3,
        ("lookups", "d1", "none"): 4,
        ("prefetches", "d1"): 5,
        ("evictions", "d1", "device"): 6,
        ("evictions", "d1", "memory"): 7,
        ("evictions", "d1", "disk"): 8,
        ("failures", "d1"): 9,
        ("late_rows", "d1", "paused"): 10,
        ("late_rows", "d1", "began"): 11,
        ("bytes", "d1", "device"): 12,
        ("bytes", "d1", "memory"): 13,
        ("bytes", "d1", "disk"): 14,
    }
    assert sorted(told.values()) == sorted(COUNTERS.model_dump().values())
