"""What Prometheus scrapes of LoRAs: at workers, in host tiers, in the stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from giornata.wire.workers import ServiceState
from giornata_gateway.metric_families import counter, gauge


def adapter_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Where the LoRAs of each worker's rows come from, by tier, and what rows do that have to wait."""
    meaning = "Lookups of LoRAs for rows, by the tier that had them; tier `none`: the LoRA store was asked."
    lookups = counter("adapter_lookups", meaning, "worker", "tier")
    sizes = gauge("adapter_bytes", "LoRAs in a tier.", "worker", "tier")
    limits = gauge(
        "adapter_limit_bytes", "Most bytes of LoRAs that no row uses, in a tier.", "worker", "tier"
    )
    evictions = counter("adapter_evictions", "LoRAs that had to go for others.", "worker", "tier")
    prefetched = counter("adapter_prefetches", "LoRAs read ahead of their edits.", "worker")
    planned = counter("adapter_planned_loads", "LoRAs that were loaded since the plan wants them.", "worker")
    waits = counter("adapter_wait_seconds", "Time that loads for rows took.", "worker")
    failed = counter("adapter_failures", "Loads that failed.", "worker")
    meaning = "Rows whose LoRAs were not loaded in time: they `paused`, or `began` without them."
    late = counter("adapter_late_rows", meaning, "worker", "what")
    for state in states:
        count = state.worker.adapters if state.worker else None
        if count is None:
            continue
        worker = state.instance
        for tier, hits, size_bytes, evicted in (
            ("device", count.hits_device, count.device_bytes, count.evicted_device),
            ("memory", count.hits_memory, count.memory_bytes, count.evicted_memory),
            ("disk", count.hits_disk, count.disk_bytes, count.evicted_disk),
        ):
            lookups.add_metric([worker, tier], hits)
            sizes.add_metric([worker, tier], size_bytes)
            evictions.add_metric([worker, tier], evicted)
        lookups.add_metric([worker, "none"], count.misses)
        prefetched.add_metric([worker], count.prefetched)
        limits.add_metric([worker, "memory"], count.memory_limit_bytes)
        planned.add_metric([worker], count.planned)
        waits.add_metric([worker], count.waited_ms / 1e3)
        failed.add_metric([worker], count.failed)
        late.add_metric([worker, "paused"], count.paused)
        late.add_metric([worker, "began"], count.late)
    yield from (lookups, sizes, limits, evictions, prefetched, planned, waits, failed, late)


def lora_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """What each LoRA store keeps and does."""
    used = gauge("lora_store_bytes", "Bytes of all files in the store's folder.", "instance")
    limit = gauge("lora_store_limit_bytes", "Most bytes of all files.", "instance")
    waiting = gauge("lora_validating", "LoRAs that wait for prepost, or are with it.", "instance")
    uploads = counter("lora_uploads", "Uploads that began or became a LoRA.", "instance", "stage")
    ended = counter("lora_validations", "Validations that ended.", "instance", "outcome")
    read = counter("lora_read_bytes", "Bytes given out.", "instance")
    for state in states:
        if (told := state.loras) is None:
            continue
        instance = [state.instance]
        used.add_metric(instance, told.stored_bytes)
        limit.add_metric(instance, told.limit_bytes)
        waiting.add_metric(instance, told.validating)
        uploads.add_metric([*instance, "begun"], told.uploads)
        uploads.add_metric([*instance, "finished"], told.finished)
        ended.add_metric([*instance, "ready"], told.ready)
        ended.add_metric([*instance, "failed"], told.failed)
        read.add_metric(instance, told.read_bytes)
    yield from (used, limit, waiting, uploads, ended, read)


def host_tier_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """What each host tier of LoRAs holds, and why files were brought there."""
    sizes = gauge("lora_host_bytes", "LoRAs in a host tier.", "host")
    limits = gauge("lora_host_limit_bytes", "Most bytes of LoRAs in a host tier.", "host")
    missing = gauge("lora_host_missing", "LoRAs that are wanted in a host tier and not there yet.", "host")
    hits = counter("lora_host_hits", "LoRAs that were asked for and in the host tier.", "host")
    meaning = (
        "LoRAs that were brought to a host tier, by the reason: `demand`, `ahead` of a job, or by `plan`."
    )
    loads = counter("lora_host_loads", meaning, "host", "reason")
    waits = counter("lora_host_wait_seconds", "Time that loads on demand and ahead took.", "host")
    evictions = counter("lora_host_evictions", "LoRAs that had to go for others.", "host")
    failures = counter("lora_host_failures", "Loads that failed.", "host")
    plans = counter("lora_host_plans", "Wanted sets, `taken` up or `ignored`.", "host", "what")
    for state in states:
        if (told := state.host_tier) is None:
            continue
        host = [told.name]
        sizes.add_metric(host, told.used_bytes)
        limits.add_metric(host, told.budget_bytes)
        missing.add_metric(host, told.missing)
        hits.add_metric(host, told.hits)
        for reason, count in (
            ("demand", told.loads.demand),
            ("ahead", told.loads.ahead),
            ("plan", told.loads.plan),
        ):
            loads.add_metric([*host, reason], count)
        waits.add_metric(host, told.loads.waited_ms / 1e3)
        evictions.add_metric(host, told.evicted)
        failures.add_metric(host, told.failed)
        plans.add_metric([*host, "taken"], told.plans)
        plans.add_metric([*host, "ignored"], told.plans_ignored)
    yield from (sizes, limits, missing, hits, loads, waits, evictions, failures, plans)
