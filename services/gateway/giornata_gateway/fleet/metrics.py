"""What Prometheus scrapes: counters and histograms of this gateway, gauges of the fleet read at scrape time."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from giornata.wire.events import DoneEvent
from giornata.wire.workers import ServiceState

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Upper bounds of the histograms' buckets."""


class FleetCollector(Collector):
    """The fleet's telemetry as metrics, whatever it is when somebody looks."""

    def __init__(self, states: Callable[[], Iterable[ServiceState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Ready instances per service; rows, steps and how well their times are predicted per worker."""
        states = list(self._states())
        instances = GaugeMetricFamily("giornata_fleet_instances", "Ready instances.", labels=["service"])
        for service, count in sorted(
            Tally(str(s.service) for s in states if s.ready and not s.draining).items()
        ):
            instances.add_metric([service], count)
        running = GaugeMetricFamily(
            "giornata_worker_running_rows", "Rows in a worker's batch.", labels=["worker"]
        )
        waiting = GaugeMetricFamily(
            "giornata_worker_waiting_rows", "Rows waiting in a worker.", labels=["worker"]
        )
        steps = CounterMetricFamily(
            "giornata_worker_steps", "Row steps since the worker's start.", labels=["worker"]
        )
        r2 = GaugeMetricFamily(
            "giornata_worker_cost_r2", "R² of a worker's cost model.", labels=["worker", "of"]
        )
        residual = GaugeMetricFamily(
            "giornata_worker_cost_residual_ms",
            "Median distance of a worker's predictions from its measurements, in milliseconds.",
            labels=["worker", "of"],
        )
        for state in states:
            if state.worker is not None and state.worker.costs is not None:
                costs = state.worker.costs
                for of, one in (("compute", costs.compute), ("load", costs.load)):
                    r2.add_metric([state.instance, of], one.r2)
                    residual.add_metric([state.instance, of], one.residual_ms)
            if state.worker is not None:
                running.add_metric([state.instance], len(state.worker.running))
                waiting.add_metric([state.instance], len(state.worker.waiting))
                steps.add_metric([state.instance], state.worker.steps_total)
        yield from (instances, running, waiting, steps, r2, residual)
        yield from template_metrics(states)
        yield from router_metrics(states)


def template_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """What the templates of each worker have done, and what they weigh, by tier."""
    lookups = CounterMetricFamily(
        "giornata_template_lookups",
        "Edits that could take from a template, by the tier that had it; tier `none`: a miss.",
        labels=["worker", "tier"],
    )
    sizes = GaugeMetricFamily("giornata_template_bytes", "Recorded templates.", labels=["worker", "tier"])
    evictions = CounterMetricFamily(
        "giornata_template_evictions", "Templates that had to go for others.", labels=["worker", "tier"]
    )
    runs = CounterMetricFamily(
        "giornata_template_runs", "Template runs that ended.", labels=["worker", "outcome"]
    )
    prefetched = CounterMetricFamily(
        "giornata_template_prefetches", "Templates read from disk ahead of their edits.", labels=["worker"]
    )
    for state in states:
        count = state.worker.templates if state.worker else None
        if count is None:
            continue
        worker = state.instance
        for tier, hits in (("memory", count.hits_memory), ("disk", count.hits_disk), ("none", count.misses)):
            lookups.add_metric([worker, tier], hits)
        for tier, size_bytes, evicted in (
            ("memory", count.memory_bytes, count.evicted_memory),
            ("disk", count.disk_bytes, count.evicted_disk),
        ):
            sizes.add_metric([worker, tier], size_bytes)
            evictions.add_metric([worker, tier], evicted)
        runs.add_metric([worker, "recorded"], count.recorded)
        runs.add_metric([worker, "failed"], count.failed)
        prefetched.add_metric([worker], count.prefetched)
    yield from (lookups, sizes, evictions, runs, prefetched)


def router_metrics(states: Iterable[ServiceState]) -> Iterator[Metric]:
    """Who waits for a worker, and what the active router has learnt of steps and loads by model and device."""
    jobs = GaugeMetricFamily("giornata_router_waiting_jobs", "Prepared jobs that no worker has taken yet.")
    rows = GaugeMetricFamily("giornata_router_waiting_rows", "Their pictures.")
    labels = ["model_digest", "device", "of"]
    r2 = GaugeMetricFamily("giornata_router_cost_r2", "R² of the router's regressions.", labels=labels)
    residual = GaugeMetricFamily(
        "giornata_router_cost_residual_ms",
        "Median distance of the router's predictions from measurements, in milliseconds.",
        labels=labels,
    )
    for queue in [state.queue for state in states if state.queue is not None and state.active]:
        jobs.add_metric([], queue.jobs)
        rows.add_metric([], queue.rows)
        for kind in queue.costs:
            for of, one in (("compute", kind.compute), ("load", kind.load)):
                r2.add_metric([kind.model_digest, kind.device, of], one.r2)
                residual.add_metric([kind.model_digest, kind.device, of], one.residual_ms)
    yield from (jobs, rows, r2, residual)


class Metrics:
    """This gateway's own registry."""

    def __init__(self, states: Callable[[], Iterable[ServiceState]], waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "giornata_requests_total",
            "Answered requests.",
            ["door", "route", "status", "code"],
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "giornata_request_seconds",
            "From a request to its answer.",
            ["door"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stage_seconds = Histogram(
            "giornata_stage_seconds",
            "Time a job spent per stage.",
            ["stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "giornata_errors_total",
            "Errors answered, and of jobs that nobody waited for.",
            ["code"],
            registry=self.registry,
        )
        self._slo = Counter(
            "giornata_slo_total",
            "Ended jobs that asked for a time to end in, and whether they were completed in it.",
            ["met"],
            registry=self.registry,
        )
        self._tenant_refusals = Counter(
            "giornata_tenant_refusals_total",
            "Requests refused by a limit of their tenant.",
            ["tenant", "code"],
            registry=self.registry,
        )
        self._repeated = Counter(
            "giornata_repeated_requests_total",
            "Requests answered with the job of an earlier one, by their idempotency key.",
            ["door"],
            registry=self.registry,
        )
        in_flight = Gauge(
            "giornata_jobs_in_flight", "Jobs that somebody waits for at this gateway.", registry=self.registry
        )
        in_flight.set_function(waiting)
        self.registry.register(FleetCollector(states))

    def answered(self, door: str, route: str, status: int, code: str, seconds: float) -> None:
        """Count one answer; `code` is "ok" or the error's."""
        self._requests.labels(door, route, str(status), code).inc()
        self._request_seconds.labels(door).observe(seconds)
        if code != "ok":
            self._errors.labels(code).inc()

    def tenant_refused(self, tenant: str, code: str) -> None:
        """Count one refusal by a limit of a tenant."""
        self._tenant_refusals.labels(tenant, code).inc()

    def repeated(self, door: str) -> None:
        """Count one request that computes nothing."""
        self._repeated.labels(door).inc()

    def job_ended(self, event: DoneEvent, *, awaited: bool) -> None:
        """Take in the stage times of a job of this gateway, and its error where no answer will count it."""
        for stage, milliseconds in event.stage_ms.model_dump().items():
            self._stage_seconds.labels(stage).observe(milliseconds / 1000)
        if event.slo_met is not None:
            self._slo.labels(str(event.slo_met).lower()).inc()
        if event.error is not None and not awaited:
            self._errors.labels(event.error.code).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
