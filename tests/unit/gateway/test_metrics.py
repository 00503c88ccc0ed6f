"""What Prometheus hears of cost models; the rest is tested beside the gateway's own answers."""

from __future__ import annotations

from giornata.wire.fleet import InstanceReport
from giornata.wire.queues import CostFit, ModelDeviceCosts, QueueState, StoreRoom
from giornata.wire.workers import (
    RankPhase,
    RankState,
    ServiceName,
    ServiceState,
    StepCacheCounters,
    WorkerCosts,
    WorkerState,
)
from giornata_gateway.metrics import Metrics


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
