"""The metrics for Prometheus: counters and histograms of this gateway, gauges of the fleet."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from giornata.shares import SharedPool
from giornata.wire.fleet import InstanceReport
from giornata.wire.messages import DoneEvent
from giornata.wire.templates import WebhookState
from giornata.wire.workers import ServiceState
from giornata_gateway.views.catalog import stores_of
from giornata_gateway.webhooks.rules.delivery_rules import DeliveryOutcome

# Metrics that are made at each scrape, under the names of Giornata.


def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    """A gauge with these labels."""
    return GaugeMetricFamily(f"giornata_{name}", meaning, labels=labels)


def counter(name: str, meaning: str, *labels: str) -> CounterMetricFamily:
    """A counter with these labels; its name gets ``_total``."""
    return CounterMetricFamily(f"giornata_{name}", meaning, labels=labels)


# What Prometheus scrapes of LoRAs: at workers, in host tiers, in the stores.


def adapter_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Return where the LoRAs of each worker's rows come from, by tier, and what rows do that have to wait."""
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
    """Return what each LoRA store keeps and does."""
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
    """Return what each host tier of LoRAs holds, and why files were brought there."""
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


# What Prometheus scrapes: counters and histograms of this gateway, gauges of the fleet read at scrape time.


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Upper bounds of the histograms' buckets."""


def worker_metrics(reports: Iterable[InstanceReport]) -> Iterator[Metric]:
    """Rows and steps of each worker, and how well its cost model predicts them."""
    running = gauge("worker_running_rows", "Rows in a worker's batch.", "worker")
    waiting = gauge("worker_waiting_rows", "Rows waiting in a worker.", "worker")
    steps = counter("worker_steps", "Row steps since the worker's start.", "worker")
    r2 = gauge("worker_cost_r2", "R² of a worker's cost model.", "worker", "of")
    meaning = "Median distance of a worker's predictions from its measurements."
    residual = gauge("worker_cost_residual_seconds", meaning, "worker", "of")
    meaning = "Blocks of rows with step caches, by whether they were computed."
    blocks = counter("denoiser_step_cache_blocks", meaning, "worker", "outcome")
    for report in reports:
        state = report.state
        if (worker := state.worker) is None:
            continue
        if worker.step_cache is not None:
            blocks.add_metric([state.instance, "computed"], worker.step_cache.computed_blocks)
            blocks.add_metric([state.instance, "skipped"], worker.step_cache.skipped_blocks)
        running.add_metric([state.instance], report.running_rows)
        waiting.add_metric([state.instance], report.waiting_rows)
        steps.add_metric([state.instance], worker.steps_total)
        if worker.cost_model is not None:
            for of, one in (("compute", worker.cost_model.compute), ("load", worker.cost_model.load)):
                r2.add_metric([state.instance, of], one.r2)
                residual.add_metric([state.instance, of], one.residual_ms / 1e3)
    yield from (running, waiting, steps, blocks, r2, residual)


def template_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Return what the templates of each worker have done, and how large they are, by tier."""
    meaning = "Edits that could take from a template, by the tier that had it; tier `none`: a miss."
    lookups = counter("template_lookups", meaning, "worker", "tier")
    sizes = gauge(
        "template_bytes", "Recorded templates, and what edits have learned from them.", "worker", "tier"
    )
    evictions = counter("template_evictions", "Templates that had to go for others.", "worker", "tier")
    runs = counter("template_runs", "Template runs that ended.", "worker", "outcome")
    prefetched = counter("template_prefetches", "Templates read from disk ahead of their edits.", "worker")
    corrected = counter(
        "template_corrections", "Rows that took what an earlier edit of their mask had learned.", "worker"
    )
    firsts = counter(
        "template_firsts", "Pictures of which an edit left what serves the next ones, not recorded.", "worker"
    )
    for state in states:
        count = state.worker.templates if state.worker else None
        if count is None:
            continue
        worker = state.instance
        for tier, hits in (
            ("memory", count.hits_memory),
            ("disk", count.hits_disk),
            ("first", count.hits_first),
            ("none", count.misses),
        ):
            lookups.add_metric([worker, tier], hits)
        for tier, size_bytes, evicted in (
            ("memory", count.memory_bytes, count.evicted_memory),
            ("disk", count.disk_bytes, count.evicted_disk),
        ):
            sizes.add_metric([worker, tier], size_bytes)
            evictions.add_metric([worker, tier], evicted)
        runs.add_metric([worker, "recorded"], count.recorded)
        runs.add_metric([worker, "failed"], count.failed)
        sizes.add_metric([worker, "corrections"], count.corrections_bytes)
        sizes.add_metric([worker, "first"], count.first_bytes)
        firsts.add_metric([worker], count.first)
        prefetched.add_metric([worker], count.prefetched)
        corrected.add_metric([worker], count.corrected)
    yield from (lookups, sizes, evictions, runs, prefetched, corrected, firsts)


def router_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """The jobs that wait at the active router, and what it has learnt of steps and loads by model and device."""
    jobs = gauge("router_waiting_jobs", "Jobs that no worker has taken yet: in the queue, and prepared.")
    rows = gauge("router_waiting_rows", "Their pictures.")
    unreadable = gauge("router_unreadable_jobs", "Messages in the queue that the router cannot read.")
    labels = ("model_digest", "device", "of")
    r2 = gauge("router_cost_r2", "R² of the router's regressions.", *labels)
    meaning = "Median distance of the router's predictions from measurements."
    residual = gauge("router_cost_residual_seconds", meaning, *labels)
    for state in states:
        if (queue := state.queue) is None or not state.active:
            continue
        jobs.add_metric([], queue.jobs)
        rows.add_metric([], queue.rows)
        unreadable.add_metric([], queue.unreadable)
        for kind in queue.costs:
            for of, one in (("compute", kind.compute), ("load", kind.load)):
                r2.add_metric([kind.model_digest, kind.device, of], one.r2)
                residual.add_metric([kind.model_digest, kind.device, of], one.residual_ms / 1e3)
    yield from (jobs, rows, unreadable, r2, residual)


def wait_metric(waits_s: Mapping[str, float]) -> Metric:
    """Return what autoscalers scale denoisers by; a model whose workers' speed is unknown has none."""
    meaning = "How long one more picture would wait for a worker, as the active router predicts it."
    found = gauge("router_predicted_wait_seconds", meaning, "model")
    for model, wait_s in waits_s.items():
        found.add_metric([model], wait_s)
    return found


def control_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Return what each ControlNet service computes, and where its rows find their weights."""
    rows = gauge("control_rows", "Rows that are open.", "instance")
    size = gauge("control_resident_bytes", "Weights on the device.", "instance")
    pending = gauge("control_pending_seconds", "Predicted time of the steps that wait or run.", "instance")
    meaning = "Rows that were opened, by whether the weights of all their ControlNets were there."
    opened = counter("control_opened_rows", meaning, "instance", "weights")
    evictions = counter("control_evictions", "ControlNets that had to go for others.", "instance")
    meaning = "Row steps, `computed` or `late`: nobody waited for them when their turn came."
    steps = counter("control_steps", meaning, "instance", "what")
    for state in states:
        if (told := state.control) is None:
            continue
        instance = [state.instance]
        rows.add_metric(instance, told.rows)
        size.add_metric(instance, told.resident_bytes)
        pending.add_metric(instance, told.pending_ms / 1e3)
        opened.add_metric([*instance, "resident"], told.hits)
        opened.add_metric([*instance, "loaded"], told.misses)
        evictions.add_metric(instance, told.evicted)
        steps.add_metric([*instance, "computed"], told.steps_total)
        steps.add_metric([*instance, "late"], told.late_total)
    yield from (rows, size, pending, opened, evictions, steps)


def pool_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """The devices of workers that have several."""
    ranks = gauge("pool_ranks", "Devices of a worker, by what they are doing.", "worker", "phase")
    starts = counter("pool_rank_starts", "Processes that were started for a device.", "worker", "device")
    for state in states:
        told = state.worker.ranks if state.worker else ()
        for phase, count in sorted(Tally(str(rank.phase) for rank in told).items()):
            ranks.add_metric([state.instance, phase], count)
        for index, rank in enumerate(told):
            starts.add_metric([state.instance, f"{index} {rank.device}"], rank.starts)
    yield from (ranks, starts)


def store_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Return how full JetStream's streams are, as the active router has read it."""
    used = gauge("store_bytes", "Bytes in a stream.", "store")
    limit = gauge("store_limit_bytes", "Most bytes that the stream may hold.", "store")
    for room in stores_of(states) or ():
        used.add_metric([room.store], room.used_bytes)
        limit.add_metric([room.store], room.limit_bytes)
    yield from (used, limit)


def share_metrics(pools: Mapping[str, SharedPool]) -> Iterator[Metric]:
    """Return how full this gateway's shared pools are, and what tenants did not get of them, or had to give back."""
    used = gauge("shared_pool_used", "What is held of a pool that tenants share.", "pool")
    limit = gauge("shared_pool_limit", "What such a pool holds at most.", "pool")
    outcomes = counter(
        "shared_pool_outcomes", "Refusals, and holdings taken back for others.", "pool", "tenant", "outcome"
    )
    for name, pool in pools.items():
        used.add_metric([name], pool.used)
        limit.add_metric([name], pool.capacity)
        for labels, count in pool.outcomes.items():
            outcomes.add_metric([name, *labels], count)
    yield from (used, limit, outcomes)


class Metrics:
    """This gateway's own registry, and what the router reports of the fleet at each scrape."""

    def __init__(
        self,
        waiting: Callable[[], int],
        webhooks: Callable[[WebhookState], int] = lambda _: 0,
        pools: Mapping[str, SharedPool] = MappingProxyType({}),
    ) -> None:
        self._pools = pools
        self.registry = CollectorRegistry()
        count = partial(Counter, registry=self.registry)
        time = partial(Histogram, buckets=SECONDS, registry=self.registry)
        answered = ["door", "route", "status", "code"]
        self._requests = count("giornata_requests_total", "Answered requests.", answered)
        self._request_seconds = time("giornata_request_seconds", "From a request to its answer.", ["door"])
        self._stage_seconds = time("giornata_stage_seconds", "Time a job spent per stage.", ["stage"])
        meaning = "Errors answered, and errors of jobs for which no request waited."
        self._errors = count("giornata_errors_total", meaning, ["code"])
        meaning = "Ended jobs that asked for a time to end in, and whether they were completed in it."
        self._slo = count("giornata_slo_total", meaning, ["met"])
        meaning = "Requests refused by a limit of their tenant."
        self._tenant_refusals = count("giornata_tenant_refusals_total", meaning, ["tenant", "code"])
        meaning = "Requests answered with the job of an earlier one, by their idempotency key."
        self._repeated = count("giornata_repeated_requests_total", meaning, ["door"])
        meaning = "Attempts to send a webhook: taken, failed, or given up."
        self._webhooks = count("giornata_webhook_attempts_total", meaning, ["outcome"])
        meaning = "Jobs for which a request waits at this gateway."
        in_flight = Gauge("giornata_jobs_in_flight", meaning, registry=self.registry)
        in_flight.set_function(waiting)
        meaning = "Whether a store took no write when this gateway last tried: its disk or its room is full."
        self._storage_full = Gauge("giornata_storage_full", meaning, ["store"], registry=self.registry)
        meaning = "Webhooks of all tenants that no receiver has taken: waiting ones are sent again, dead ones are not."
        kept = Gauge("giornata_webhooks", meaning, ["state"], registry=self.registry)
        for state in WebhookState:
            kept.labels(state).set_function(partial(webhooks, state))

    def stores_tried(self, full: Mapping[str, bool]) -> None:
        """Take in which stores were full when they were last tried."""
        for store, one in full.items():
            self._storage_full.labels(store).set(one)

    def answered(self, door: str, route: str, status: int, code: str, seconds: float) -> None:
        """Count one answer; `code` is "ok" or the error's."""
        self._requests.labels(door, route, str(status), code).inc()
        self._request_seconds.labels(door).observe(seconds)
        if code != "ok":
            self._errors.labels(code).inc()

    def tenant_refused(self, tenant: str, code: str) -> None:
        """Count one refusal by a limit of a tenant."""
        self._tenant_refusals.labels(tenant, code).inc()

    def webhook_sent(self, outcome: DeliveryOutcome) -> None:
        """Count one attempt to send a webhook."""
        self._webhooks.labels(outcome).inc()

    def repeated(self, door: str) -> None:
        """Count one request that computes nothing."""
        self._repeated.labels(door).inc()

    def job_ended(self, event: DoneEvent, *, awaited: bool) -> None:
        """Take in the stage times of a job of this gateway, and its error where no answer will count it."""
        for stage, milliseconds in event.stage_ms.known().items():
            self._stage_seconds.labels(stage).observe(milliseconds / 1000)
        if event.slo_met is not None:
            self._slo.labels(str(event.slo_met).lower()).inc()
        if event.error is not None and not awaited:
            self._errors.labels(event.error.code).inc()

    def exposition(
        self, reports: Sequence[InstanceReport], waits_s: Mapping[str, float] = MappingProxyType({})
    ) -> bytes:
        """Everything in Prometheus' text format; of the fleet what is reported, and nothing without a router."""
        return generate_latest(self.registry) + generate_latest(_FleetRegistry(reports, waits_s, self._pools))


class _FleetRegistry(CollectorRegistry):
    """A registry of the metrics that are reported of the fleet."""

    def __init__(
        self,
        reports: Sequence[InstanceReport],
        waits_s: Mapping[str, float],
        pools: Mapping[str, SharedPool],
    ) -> None:
        super().__init__()
        self._reports, self._waits_s, self._pools = reports, waits_s, pools

    def collect(self) -> Iterator[Metric]:
        """Ready instances per service, and what workers and the active router tell."""
        states = [report.state for report in self._reports]
        instances = gauge("fleet_instances", "Ready instances.", "service")
        ready = Tally(str(state.service) for state in states if state.ready and not state.draining)
        for service, count in sorted(ready.items()):
            instances.add_metric([service], count)
        yield instances
        lost = counter("log_lines_lost", "Log lines that an instance could not write.", "service", "instance")
        for state in states:
            lost.add_metric([str(state.service), state.instance], state.log_lines_lost)
        yield lost
        yield from worker_metrics(self._reports)
        yield from template_metrics(states)
        yield from adapter_metrics(states)
        yield from router_metrics(states)
        yield wait_metric(self._waits_s)
        yield from store_metrics(states)
        yield from lora_metrics(states)
        yield from host_tier_metrics(states)
        yield from control_metrics(states)
        yield from pool_metrics(states)
        yield from share_metrics(self._pools)
