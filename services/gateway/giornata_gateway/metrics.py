"""The metrics for Prometheus: counters and histograms of this gateway, and what the fleet reports at each scrape."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from giornata.shares import SharedPool
from giornata.wire.messages import DoneEvent
from giornata.wire.templates import WebhookState
from giornata.wire.workers import InstanceReport, ServiceState
from giornata_gateway.views.catalog import stores_of


class FleetScrape(NamedTuple):
    """The state of the fleet at one scrape: reports of instances, waits by model in seconds, this gateway's pools."""

    reports: Sequence[InstanceReport]
    waits_s: Mapping[str, float]
    pools: Mapping[str, SharedPool]

    @property
    def states(self) -> list[ServiceState]:
        """The instances' own words."""
        return [report.state for report in self.reports]


Parts = Iterator[tuple[tuple[str, ...], Any]]
"""Parts of a scrape that have samples, or samples themselves, each with its labels."""


class FleetMetric(NamedTuple):
    """A metric that is made at each scrape, under a name of Giornata; a counter's name gets ``_total``."""

    family: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    meaning: str
    fields: Mapping[str, str]
    """Fields of a part, by the value of `by`; of no name where the part is the sample. Milliseconds become seconds."""
    by: str = ""
    """A further label."""


def gauge(name: str, meaning: str, field: str = "", *, by: str = "", **fields: str) -> FleetMetric:
    """A gauge of one field of each part, or, with a label `by`, of several."""
    return FleetMetric(GaugeMetricFamily, name, meaning, fields or {"": field}, by)


def counter(name: str, meaning: str, field: str = "", *, by: str = "", **fields: str) -> FleetMetric:
    """A counter of one field of each part, or, with a label `by`, of several."""
    return FleetMetric(CounterMetricFamily, name, meaning, fields or {"": field}, by)


def reported(path: str, named: str = "state.instance") -> Callable[[FleetScrape], Parts]:
    """Finds the part at `path` of every report that has one; it is labelled by what is `named`."""
    *outer, last = path.split(".")

    def found(scrape: FleetScrape) -> Parts:
        for report in scrape.reports:
            part: Any = report
            for name in (*outer, last):
                part = None if part is None else getattr(part, name)
            if part is not None:
                yield (attrgetter(named)(report),), part

    return found


def _workers(scrape: FleetScrape) -> Parts:
    yield from (((one.state.instance,), one) for one in scrape.reports if one.state.worker is not None)


def _instances(scrape: FleetScrape) -> Parts:
    ready = Tally(str(state.service) for state in scrape.states if state.ready and not state.draining)
    yield from (((service,), count) for service, count in sorted(ready.items()))


def _logs(scrape: FleetScrape) -> Parts:
    yield from (((str(state.service), state.instance), state) for state in scrape.states)


def _queues(scrape: FleetScrape) -> Parts:
    """The active router's."""
    yield from (((), state.queue) for state in scrape.states if state.queue is not None and state.active)


def _costs(scrape: FleetScrape) -> Parts:
    for _, queue in _queues(scrape):
        yield from (((kind.model_digest, kind.device), kind) for kind in queue.costs)


def _phases(scrape: FleetScrape) -> Parts:
    for state in scrape.states:
        phases = Tally(str(rank.phase) for rank in (state.worker.ranks if state.worker else ()))
        yield from (((state.instance, phase), count) for phase, count in sorted(phases.items()))


def _ranks(scrape: FleetScrape) -> Parts:
    for state in scrape.states:
        ranks = enumerate(state.worker.ranks if state.worker else ())
        yield from (((state.instance, f"{index} {rank.device}"), rank) for index, rank in ranks)


def _outcomes(scrape: FleetScrape) -> Parts:
    for name, pool in scrape.pools.items():
        yield from (((name, *labels), count) for labels, count in pool.outcomes.items())


FLEET: Final[Sequence[tuple[tuple[str, ...], Callable[[FleetScrape], Parts], Sequence[FleetMetric]]]] = (
    (("service",), _instances, [gauge("fleet_instances", "Ready instances.")]),
    (("service", "instance"), _logs, [
        counter("log_lines_lost", "Log lines that an instance could not write.", "log_lines_lost"),
    ]),
    (("worker",), _workers, [
        gauge("worker_running_rows", "Rows in a worker's batch.", "running_rows"),
        gauge("worker_waiting_rows", "Rows waiting in a worker.", "waiting_rows"),
        counter("worker_steps", "Row steps since the worker's start.", "state.worker.steps_total"),
    ]),
    (("worker",), reported("state.worker.step_cache"), [
        counter("denoiser_step_cache_blocks", "Blocks of rows with step caches, by whether they were computed.",
                by="outcome", computed="computed_blocks", skipped="skipped_blocks"),
    ]),
    (("worker",), reported("state.worker.cost_model"), [
        gauge("worker_cost_r2", "R² of a worker's cost model.", by="of", compute="compute.r2", load="load.r2"),
        gauge("worker_cost_residual_seconds", "Median distance of a worker's predictions from its measurements.",
              by="of", compute="compute.residual_ms", load="load.residual_ms"),
    ]),
    (("worker",), reported("state.worker.templates"), [
        counter("template_lookups",
                "Edits that could take from a template, by the tier that had it; tier `none`: a miss.",
                by="tier", memory="hits_memory", disk="hits_disk", first="hits_first", none="misses"),
        gauge("template_bytes", "Recorded templates, and what edits have learned from them.", by="tier",
              memory="memory_bytes", disk="disk_bytes", corrections="corrections_bytes", first="first_bytes"),
        counter("template_evictions", "Templates that had to go for others.",
                by="tier", memory="evicted_memory", disk="evicted_disk"),
        counter("template_runs", "Template runs that ended.", by="outcome", recorded="recorded", failed="failed"),
        counter("template_prefetches", "Templates read from disk ahead of their edits.", "prefetched"),
        counter("template_corrections", "Rows that took what an earlier edit of their mask had learned.", "corrected"),
        counter("template_firsts", "Pictures of which an edit left what serves the next ones, not recorded.", "first"),
    ]),
    (("worker",), reported("state.worker.adapters"), [
        counter("adapter_lookups",
                "Lookups of LoRAs for rows, by the tier that had them; tier `none`: the LoRA store was asked.",
                by="tier", device="hits_device", memory="hits_memory", disk="hits_disk", none="misses"),
        gauge("adapter_bytes", "LoRAs in a tier.",
              by="tier", device="device_bytes", memory="memory_bytes", disk="disk_bytes"),
        gauge("adapter_limit_bytes", "Most bytes of LoRAs that no row uses, in a tier.",
              by="tier", memory="memory_limit_bytes"),
        counter("adapter_evictions", "LoRAs that had to go for others.",
                by="tier", device="evicted_device", memory="evicted_memory", disk="evicted_disk"),
        counter("adapter_prefetches", "LoRAs read ahead of their edits.", "prefetched"),
        counter("adapter_wait_seconds", "Time that loads for rows took.", "waited_ms"),
        counter("adapter_failures", "Loads that failed.", "failed"),
        counter("adapter_late_rows",
                "Rows whose LoRAs were not loaded in time: they `paused`, or `began` without them.",
                by="what", paused="paused", began="late"),
    ]),
    ((), _queues, [
        gauge("router_waiting_jobs", "Jobs that no worker has taken yet: in the queue, and prepared.", "jobs"),
        gauge("router_waiting_rows", "Their pictures.", "rows"),
        gauge("router_unreadable_jobs", "Messages in the queue that the router cannot read.", "unreadable"),
    ]),
    (("model_digest", "device"), _costs, [
        gauge("router_cost_r2", "R² of the router's regressions.", by="of", compute="compute.r2", load="load.r2"),
        gauge("router_cost_residual_seconds", "Median distance of the router's predictions from measurements.",
              by="of", compute="compute.residual_ms", load="load.residual_ms"),
    ]),
    (("model",), lambda scrape: (((model,), wait_s) for model, wait_s in scrape.waits_s.items()), [
        # autoscalers scale denoisers by it; a model whose workers' speed is unknown has none
        gauge("router_predicted_wait_seconds",
              "How long one more picture would wait for a worker, as the active router predicts it."),
    ]),
    (("store",), lambda scrape: (((room.store,), room) for room in stores_of(scrape.states) or ()), [
        gauge("store_bytes", "Bytes in a stream.", "used_bytes"),
        gauge("store_limit_bytes", "Most bytes that the stream may hold.", "limit_bytes"),
    ]),
    (("instance",), reported("state.loras"), [
        gauge("lora_store_bytes", "Bytes of all files in the store's folder.", "stored_bytes"),
        gauge("lora_store_limit_bytes", "Most bytes of all files.", "limit_bytes"),
        gauge("lora_validating", "LoRAs that wait for prepost, or are with it.", "validating"),
        counter("lora_uploads", "Uploads that began or became a LoRA.",
                by="stage", begun="uploads", finished="finished"),
        counter("lora_validations", "Validations that ended.", by="outcome", ready="ready", failed="failed"),
        counter("lora_read_bytes", "Bytes given out.", "read_bytes"),
    ]),
    (("host",), reported("state.host_tier", "state.host_tier.name"), [
        gauge("lora_host_bytes", "LoRAs in a host tier.", "used_bytes"),
        gauge("lora_host_limit_bytes", "Most bytes of LoRAs in a host tier.", "budget_bytes"),
        gauge("lora_host_missing", "LoRAs that are wanted in a host tier and not there yet.", "missing"),
        counter("lora_host_hits", "LoRAs that were asked for and in the host tier.", "hits"),
        counter("lora_host_loads",
                "LoRAs that were brought to a host tier, by the reason: `demand`, `ahead` of a job, or by `plan`.",
                by="reason", demand="loads.demand", ahead="loads.ahead", plan="loads.plan"),
        counter("lora_host_wait_seconds", "Time that loads on demand and ahead took.", "loads.waited_ms"),
        counter("lora_host_evictions", "LoRAs that had to go for others.", "evicted"),
        counter("lora_host_failures", "Loads that failed.", "failed"),
        counter("lora_host_plans", "Wanted sets, `taken` up or `ignored`.",
                by="what", taken="plans", ignored="plans_ignored"),
    ]),
    (("instance",), reported("state.control"), [
        gauge("control_rows", "Rows that are open.", "rows"),
        gauge("control_resident_bytes", "Weights on the device.", "resident_bytes"),
        gauge("control_pending_seconds", "Predicted time of the steps that wait or run.", "pending_ms"),
        counter("control_opened_rows",
                "Rows that were opened, by whether the weights of all their ControlNets were there.",
                by="weights", resident="hits", loaded="misses"),
        counter("control_evictions", "ControlNets that had to go for others.", "evicted"),
        counter("control_steps", "Row steps, `computed` or `late`: nobody waited for them when their turn came.",
                by="what", computed="steps_total", late="late_total"),
    ]),
    (("worker", "phase"), _phases, [gauge("pool_ranks", "Devices of a worker, by what they are doing.")]),
    (("worker", "device"), _ranks, [
        counter("pool_rank_starts", "Processes that were started for a device.", "starts"),
    ]),
    (("pool",), lambda scrape: (((name,), pool) for name, pool in scrape.pools.items()), [
        gauge("shared_pool_used", "What is held of a pool that tenants share.", "used"),
        gauge("shared_pool_limit", "What such a pool holds at most.", "capacity"),
    ]),
    (("pool", "tenant", "outcome"), _outcomes, [
        counter("shared_pool_outcomes", "Refusals, and holdings taken back for others."),
    ]),
)  # fmt: skip
"""Labels, where their parts are found, and the metrics of these."""
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Upper bounds of the histograms' buckets."""


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
        self.tenant_refusals = count("giornata_tenant_refusals_total", meaning, ["tenant", "code"])
        meaning = "Requests answered with the job of an earlier one, by their idempotency key."
        self.repeated = count("giornata_repeated_requests_total", meaning, ["door"])
        meaning = "Attempts to send a webhook: taken, failed, or given up."
        self.webhooks = count("giornata_webhook_attempts_total", meaning, ["outcome"])
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
        scrape = FleetScrape(reports, waits_s, self._pools)
        return generate_latest(self.registry) + generate_latest(_FleetRegistry(scrape))


class _FleetRegistry(CollectorRegistry):
    """A registry of the metrics that are made at a scrape."""

    def __init__(self, scrape: FleetScrape) -> None:
        super().__init__()
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        """Every family, also one without a sample."""
        for labels, parts, metrics in FLEET:
            found = list(parts(self._scrape))
            for metric in metrics:
                named = [*labels, metric.by] if metric.by else labels
                family = metric.family(f"giornata_{metric.name}", metric.meaning, labels=named)
                for place, part in found:
                    for value, field in metric.fields.items():
                        number = attrgetter(field)(part) if field else part
                        scale = 1e3 if field.endswith("_ms") else 1
                        family.add_metric([*place, *([value] if metric.by else [])], number / scale)
                yield family
