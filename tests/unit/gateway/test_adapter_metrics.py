"""What Prometheus is told of workers' LoRAs."""

from __future__ import annotations

from giornata.wire.host_tiers import HostTier, TierLoads
from giornata.wire.workers import AdapterCounters, ServiceName, ServiceState
from giornata_gateway.adapter_metrics import adapter_metrics, host_tier_metrics
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
    planned=15,
    waited_ms=16.0,
    memory_limit_bytes=17,
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
        ("planned_loads", "d1"): 15,
        ("wait_seconds", "d1"): 0.016,
        ("limit_bytes", "d1", "memory"): 17,
    }
    counted = COUNTERS.model_dump() | {"waited_ms": 0.016}  # in seconds
    assert sorted(told.values()) == sorted(counted.values())


def test_a_host_tier_is_told_by_its_name() -> None:
    tier = HostTier(
        name="rack-1",
        epoch=1,
        number=1,
        budget_bytes=2,
        used_bytes=3,
        hits=4,
        loads=TierLoads(demand=5, ahead=6, plan=7, waited_ms=8000.0),
        evicted=9,
        failed=10,
        plans=11,
        plans_ignored=12,
        missing=13,
    )
    state = ServiceState(
        service=ServiceName.LORA_STORE, instance="s1", host="h", version="1", ready=True, host_tier=tier
    )
    told = {
        (family.name.removeprefix("giornata_lora_host_"), *sample.labels.values()): sample.value
        for family in host_tier_metrics([state, state.model_copy(update={"host_tier": None})])
        for sample in family.samples
    }
    assert told == {
        ("limit_bytes", "rack-1"): 2,
        ("bytes", "rack-1"): 3,
        ("hits", "rack-1"): 4,
        ("loads", "rack-1", "demand"): 5,
        ("loads", "rack-1", "ahead"): 6,
        ("loads", "rack-1", "plan"): 7,
        ("wait_seconds", "rack-1"): 8,
        ("evictions", "rack-1"): 9,
        ("failures", "rack-1"): 10,
        ("plans", "rack-1", "taken"): 11,
        ("plans", "rack-1", "ignored"): 12,
        ("missing", "rack-1"): 13,
    }
