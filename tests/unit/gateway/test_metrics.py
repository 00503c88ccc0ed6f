"""What Prometheus hears: of instances, under names that keep its conventions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from giornata.wire.controlnets import ControlState
from giornata.wire.loras import HostTier, LoraCounters, TierLoads
from giornata.wire.workers import (
    AdapterCounters,
    CostFit,
    InstanceReport,
    ModelDeviceCosts,
    QueueState,
    RankPhase,
    RankState,
    ServiceName,
    ServiceState,
    StepCacheCounters,
    StoreRoom,
    TemplateCounters,
    WorkerCosts,
)
from giornata_gateway.metrics import Metrics
from tests.contract.messages import WORKER

FIT = CostFit(weights=(1.0,) * 6, r2=0.98, residual_ms=0.5, samples=9, outliers=0)
COUNTERS = AdapterCounters(
    hits_device=1, hits_memory=2, hits_disk=3, misses=4, prefetched=5, evicted_device=6, evicted_memory=7,
    evicted_disk=8, failed=9, paused=10, late=11, device_bytes=12, memory_bytes=13, disk_bytes=14,
    waited_ms=16.0, memory_limit_bytes=17,
)  # fmt: skip
TEMPLATES, LORAS = (
    kind.model_validate({name: number for number, name in enumerate(kind.model_fields, 1)})
    for kind in (TemplateCounters, LoraCounters)
)
TIER = HostTier(
    name="rack-1", epoch=1, number=1, budget_bytes=2, used_bytes=3, hits=4,
    loads=TierLoads(demand=5, ahead=6, plan=7, waited_ms=8000.0), evicted=9, failed=10, plans=11, plans_ignored=12,
    missing=13,
)  # fmt: skip
CONTROL = ControlState(
    capacity_rows=64, rows=1, resident=("d1",), resident_bytes=2, hits=3, misses=4, evicted=5, steps_total=6,
    late_total=7, work_ms=8.0, pending_ms=9.0,
)  # fmt: skip
RANKS = tuple(
    RankState(device="cpu", phase=phase, starts=starts)
    for phase, starts in ((RankPhase.READY, 1), (RankPhase.LOADING, 3))
)


def state(service: ServiceName = ServiceName.DENOISER, instance: str = "d1", **told: Any) -> ServiceState:
    return ServiceState(service=service, instance=instance, host="h", version="1", ready=True, **told)


def worker(**told: Any) -> ServiceState:
    return state(worker=WORKER.model_copy(update=told))


def exported(prefix: str, *states: ServiceState) -> dict[tuple[str, ...], float]:
    """Samples of the families with a prefix, by the rest of their names and their labels' values, sorted by label."""
    text = Metrics(waiting=lambda: 0).exposition([InstanceReport(state=one) for one in states]).decode()
    return {
        (
            family.name.removeprefix(prefix),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith(prefix)
    }


COSTS = ModelDeviceCosts(model_digest="d", device="H", compute=FIT, load=FIT)
QUEUE = QueueState(jobs=3, rows=5, steps=7, costs=(COSTS,))
ROOM = StoreRoom(store="KV_giornata-jobs", used_bytes=90, limit_bytes=100)


@pytest.mark.parametrize(
    ("prefix", "states", "expected"),
    [
        (
            "giornata_worker_cost_",
            [worker(cost_model=WorkerCosts(compute=FIT, load=FIT)), worker(cost_model=None)],
            {
                ("r2", "compute", "d1"): 0.98, ("r2", "load", "d1"): 0.98,
                ("residual_seconds", "compute", "d1"): 0.0005, ("residual_seconds", "load", "d1"): 0.0005,
            },
        ),
        (
            "giornata_pool_",
            [worker(ranks=RANKS)],
            {
                ("ranks", "ready", "d1"): 1, ("ranks", "loading", "d1"): 1,
                ("rank_starts", "0 cpu", "d1"): 1, ("rank_starts", "1 cpu", "d1"): 3,
            },
        ),
        (
            "giornata_denoiser_",
            [worker(step_cache=StepCacheCounters(computed_blocks=7, skipped_blocks=5))],
            {("step_cache_blocks", "computed", "d1"): 7, ("step_cache_blocks", "skipped", "d1"): 5},
        ),
        (
            "giornata_router_",
            [
                state(ServiceName.ROUTER, queue=QUEUE),
                state(ServiceName.ROUTER, active=False, queue=QUEUE.model_copy(update={"jobs": 9})),
            ],
            {
                ("waiting_jobs",): 3, ("waiting_rows",): 5, ("unreadable_jobs",): 0,
                ("cost_r2", "H", "d", "compute"): 0.98, ("cost_r2", "H", "d", "load"): 0.98,
                ("cost_residual_seconds", "H", "d", "compute"): 0.0005,
                ("cost_residual_seconds", "H", "d", "load"): 0.0005,
            },
        ),
        (
            "giornata_store_",
            [
                state(ServiceName.ROUTER, active=False, stores=(ROOM.model_copy(update={"used_bytes": 10}),)),
                state(ServiceName.ROUTER, stores=(ROOM,)),
            ],
            {("bytes", ROOM.store): 90, ("limit_bytes", ROOM.store): 100},
        ),
        (
            "giornata_adapter_",
            [worker(adapters=COUNTERS), state(), worker(adapters=None)],
            {
                ("lookups", "device", "d1"): 1, ("lookups", "memory", "d1"): 2, ("lookups", "disk", "d1"): 3,
                ("lookups", "none", "d1"): 4, ("prefetches", "d1"): 5, ("evictions", "device", "d1"): 6,
                ("evictions", "memory", "d1"): 7, ("evictions", "disk", "d1"): 8, ("failures", "d1"): 9,
                ("late_rows", "paused", "d1"): 10, ("late_rows", "began", "d1"): 11, ("bytes", "device", "d1"): 12,
                ("bytes", "memory", "d1"): 13, ("bytes", "disk", "d1"): 14,
                ("wait_seconds", "d1"): 0.016, ("limit_bytes", "memory", "d1"): 17,
            },
        ),
        (
            "giornata_template_",
            [worker(templates=TEMPLATES), worker(templates=None)],
            {
                ("lookups", "memory", "d1"): 1, ("lookups", "disk", "d1"): 2, ("lookups", "first", "d1"): 3,
                ("lookups", "none", "d1"): 4, ("prefetches", "d1"): 5, ("evictions", "memory", "d1"): 6,
                ("evictions", "disk", "d1"): 7, ("runs", "recorded", "d1"): 8, ("runs", "failed", "d1"): 9,
                ("bytes", "memory", "d1"): 10, ("bytes", "disk", "d1"): 11, ("corrections", "d1"): 12,
                ("bytes", "corrections", "d1"): 13, ("firsts", "d1"): 14, ("bytes", "first", "d1"): 15,
            },
        ),
        (
            "giornata_lora_",
            [state(ServiceName.LORA_STORE, loras=LORAS)],
            {
                ("store_bytes", "d1"): 1, ("store_limit_bytes", "d1"): 2, ("uploads", "d1", "begun"): 3,
                ("uploads", "d1", "finished"): 4, ("validating", "d1"): 5, ("validations", "d1", "ready"): 6,
                ("validations", "d1", "failed"): 7, ("read_bytes", "d1"): 8,
            },
        ),
        (
            "giornata_lora_host_",
            [state(ServiceName.LORA_STORE, host_tier=TIER), state(ServiceName.LORA_STORE)],
            {
                ("limit_bytes", "rack-1"): 2, ("bytes", "rack-1"): 3, ("hits", "rack-1"): 4,
                ("loads", "rack-1", "demand"): 5, ("loads", "rack-1", "ahead"): 6, ("loads", "rack-1", "plan"): 7,
                ("wait_seconds", "rack-1"): 8, ("evictions", "rack-1"): 9, ("failures", "rack-1"): 10,
                ("plans", "rack-1", "taken"): 11, ("plans", "rack-1", "ignored"): 12, ("missing", "rack-1"): 13,
            },
        ),
        (
            "giornata_control_",
            [state(ServiceName.CONTROLNET, control=CONTROL), state()],
            {
                ("rows", "d1"): 1, ("resident_bytes", "d1"): 2, ("opened_rows", "d1", "resident"): 3,
                ("opened_rows", "d1", "loaded"): 4, ("evictions", "d1"): 5, ("steps", "d1", "computed"): 6,
                ("steps", "d1", "late"): 7, ("pending_seconds", "d1"): 0.009,
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_counter_of_an_instance_is_told_once(
    prefix: str, states: list[ServiceState], expected: dict[tuple[str, ...], float]
) -> None:
    told = exported(prefix, *states)
    assert told == pytest.approx(expected)
    if prefix == "giornata_adapter_":
        counted = COUNTERS.model_dump() | {"waited_ms": 0.016}  # in seconds
        assert sorted(told.values()) == pytest.approx(sorted(counted.values()))


# Prometheus' conventions, held for every metric that a gateway exports, and the dashboard's use of them.


DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboards" / "giornata.json"
BASE_UNITS = ("seconds", "bytes")
OTHER_UNITS = {
    *("ms", "us", "ns", "milliseconds", "microseconds", "minutes", "hours", "days"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "bits", "percent", "pct"),
}
RATES = re.compile(r"\b(?:rate|irate|increase)\((?:giornata_\w+)")
USED = re.compile(r"giornata_\w+")
UNITS = {"s": "seconds", "bytes": "bytes"}
"""Grafana's unit of a panel, and how the names of all that it shows end."""


def families() -> dict[str, Metric]:
    """Every family by the name that a query uses: that of a counter has its ``_total``."""
    text = Metrics(waiting=lambda: 0).exposition([]).decode()
    return {
        f"{one.name}_total" if one.type == "counter" else one.name: one
        for one in text_string_to_metric_families(text)
        if not one.name.endswith("_created")
    }


EXPORTED = families()
PANELS = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


@pytest.mark.parametrize("name", EXPORTED)
def test_a_name_has_the_prefix_a_base_unit_and_total_where_it_counts(name: str) -> None:
    words = name.split("_")
    counts = EXPORTED[name].type == "counter"
    assert re.fullmatch(r"giornata(_[a-z][a-z0-9]*)+", name)
    assert (words[-1] == "total") == counts
    assert OTHER_UNITS.isdisjoint(words), "a base unit is asked for"
    unitless = words[:-1] if counts else words
    assert all(unit not in unitless[:-1] for unit in BASE_UNITS), "the unit is the last word before `total`"
    assert unitless[-1] not in {"count", "sum", "bucket"}, "the library's own endings"
    if EXPORTED[name].type == "histogram":
        assert unitless[-1] in BASE_UNITS


def metric_of(used: str) -> str:
    """The families metric behind a series."""
    return re.sub(r"_(bucket|sum|count)$", "", used) if used not in EXPORTED else used


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_metrics_that_exist_and_for_rates_of_what_counts(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"].get("unit")
    assert panel["targets"]
    for target in panel["targets"]:
        used = USED.findall(target["expr"])
        assert used
        rated = {one.partition("(")[2] for one in RATES.findall(target["expr"])}
        for one in used:
            metric = EXPORTED[metric_of(one)]
            cumulative = metric.type in {"counter", "histogram"}
            assert (one in rated) == cumulative, f"{one} is a {metric.type}"
        if unit in UNITS:
            assert all(UNITS[unit] in one for one in used), f"the axis says {unit}"
