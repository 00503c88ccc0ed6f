"""What Prometheus hears of workers; the rest is tested beside the gateway's own answers."""

from __future__ import annotations

from giornata.wire.controlnets import ControlState
from giornata.wire.fleet import InstanceReport
from giornata.wire.loras import HostTier, TierLoads
from giornata.wire.workers import (
    AdapterCounters,
    CostFit,
    ModelDeviceCosts,
    QueueState,
    RankPhase,
    RankState,
    ServiceName,
    ServiceState,
    StepCacheCounters,
    StoreRoom,
    WorkerCosts,
    WorkerState,
)
from giornata_gateway.metrics import Metrics, adapter_metrics, control_metrics, host_tier_metrics
from tests.contract.messages import WORKER


def state(instance: str, costs: WorkerCosts | None) -> ServiceState:
    worker = WorkerState(capacity_rows=8, capacity_tokens=4096, cost_model=costs)
    return ServiceState(
        service=ServiceName.DENOISER, instance=instance, host="h", version="1", ready=True, worker=worker
    )


def test_every_worker_with_a_cost_model_tells_how_good_it_is() -> None:
    costs = WorkerCosts(
        compute=CostFit(weights=(1.0,) * 6, r2=0.98, residual_ms=0.5, samples=9, outliers=0),
        load=CostFit(weights=(1.0,) * 2, r2=0.75, residual_ms=0.25, samples=9, outliers=0),
    )
    reports = [InstanceReport(state=state("d1", costs)), InstanceReport(state=state("d2", None))]
    text = Metrics(waiting=lambda: 0).exposition(reports).decode()
    for line in (
        'giornata_worker_cost_r2{of="compute",worker="d1"} 0.98',
        'giornata_worker_cost_r2{of="load",worker="d1"} 0.75',
        'giornata_worker_cost_residual_seconds{of="compute",worker="d1"} 0.0005',
        'giornata_worker_cost_residual_seconds{of="load",worker="d1"} 0.00025',
    ):
        assert line in text, line
    assert 'cost_r2{of="compute",worker="d2"}' not in text


def test_a_pool_tells_of_its_devices() -> None:
    ranks = tuple(
        RankState(device="cpu", phase=phase, starts=starts)
        for phase, starts in ((RankPhase.READY, 1), (RankPhase.LOADING, 3))
    )
    pool = state("d1", None)
    assert pool.worker is not None
    pool = pool.model_copy(update={"worker": pool.worker.model_copy(update={"ranks": ranks})})
    text = Metrics(waiting=lambda: 0).exposition([InstanceReport(state=pool)]).decode()
    assert 'giornata_pool_ranks{phase="ready",worker="d1"} 1.0' in text
    assert 'giornata_pool_ranks{phase="loading",worker="d1"} 1.0' in text
    assert 'giornata_pool_rank_starts_total{device="1 cpu",worker="d1"} 3.0' in text


def test_blocks_of_step_caches_are_counted_by_whether_they_were_computed() -> None:
    counters = StepCacheCounters(computed_blocks=7, skipped_blocks=5)
    worker = WorkerState(capacity_rows=8, capacity_tokens=4096, step_cache=counters)
    cached = state("d1", None).model_copy(update={"worker": worker})
    text = Metrics(waiting=lambda: 0).exposition([InstanceReport(state=cached)]).decode()
    assert 'giornata_denoiser_step_cache_blocks_total{outcome="computed",worker="d1"} 7.0' in text
    assert 'giornata_denoiser_step_cache_blocks_total{outcome="skipped",worker="d1"} 5.0' in text


def test_what_the_active_router_has_learnt_is_shown() -> None:
    fit = CostFit(weights=(1.0, 0, 0, 0, 0.0, 0.0), r2=0.97, residual_ms=2.5, samples=9, outliers=0)
    costs = ModelDeviceCosts(model_digest="d", device="H", compute=fit, load=fit)
    queue = QueueState(jobs=3, rows=5, steps=7, costs=(costs,))
    state = ServiceState(
        service=ServiceName.ROUTER, instance="r1", host="h", version="1", ready=True, queue=queue
    )
    standby = state.model_copy(update={"instance": "r2", "active": False})
    reports = [InstanceReport(state=state), InstanceReport(state=standby)]
    text = Metrics(lambda: 0).exposition(reports).decode()
    assert "giornata_router_waiting_jobs 3.0" in text
    assert "giornata_router_waiting_rows 5.0" in text
    assert 'giornata_router_cost_r2{device="H",model_digest="d",of="compute"} 0.97' in text
    assert 'giornata_router_cost_residual_seconds{device="H",model_digest="d",of="load"} 0.0025' in text


def test_the_room_in_the_streams_is_the_active_routers_word() -> None:
    room = StoreRoom(store="KV_giornata-jobs", used_bytes=90, limit_bytes=100)
    active = ServiceState(
        service=ServiceName.ROUTER, instance="r1", host="h", version="1", ready=True, stores=(room,)
    )
    old = room.model_copy(update={"used_bytes": 10})
    standby = active.model_copy(update={"instance": "r2", "active": False, "stores": (old,)})
    reports = [InstanceReport(state=standby), InstanceReport(state=active)]
    text = Metrics(lambda: 0).exposition(reports).decode()
    assert 'giornata_store_bytes{store="KV_giornata-jobs"} 90.0' in text
    assert 'giornata_store_limit_bytes{store="KV_giornata-jobs"} 100.0' in text


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
