"""What simulated runs come to, and the charts of them. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from scipy.special import stdtrit

from giornata.wire.workers import Tier
from giornata_lab.loadgen.charts import Chart, Points, PointStyle, distribution, thinned
from giornata_lab.loadgen.outcomes import spread
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.residency import LoadReason

LEAST_WAIT_S: Final = 1e-9
"""A wait below it is none."""
LEAST_S: Final = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""


@dataclass(slots=True)
class WorkerCounters:
    """What a worker has done."""

    busy_s: float = 0.0
    steps: int = 0
    row_steps: int = 0
    hits: Counter[Tier | None] = field(default_factory=Counter)
    """Jobs that may reuse, by where their template was."""
    recorded: int = 0
    lora_hits: Counter[Tier | None] = field(default_factory=Counter)
    """LoRAs of rows that came, by where they were."""
    waits: list[tuple[float, float, int]] = field(default_factory=list)
    """When rows with LoRAs came, how long they waited for these and for nothing else, and how many LoRAs they need."""
    loaded: list[tuple[float, LoadReason]] = field(default_factory=list)
    """When loads onto the device began, and why."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job and when its stages ended, in seconds of the virtual clock."""

    job: SimulatedJob
    assigned_s: float
    denoised_s: float
    ended_s: float
    worker: str

    @property
    def latency_s(self) -> float:
        """Time from its arrival to its end."""
        return self.ended_s - self.job.at_s

    @property
    def waited_s(self) -> float:
        """Time from its arrival until a worker got it: encoding and the router's line."""
        return self.assigned_s - self.job.at_s


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The cluster, seen once a second."""

    at_s: float
    waiting: int
    """Jobs in the router's line."""
    unfinished: int
    """Jobs that have arrived and not ended."""


@dataclass(frozen=True)
class SimulatedRun:
    """Everything that one simulation tells."""

    ended: tuple[EndedJob, ...]
    """In the order of their ends."""
    workers: tuple[WorkerCounters, ...]
    moments: tuple[ClusterSample, ...]
    seconds: float
    """Virtual ones, until the last job ended."""

    def latencies(self, warmup_s: float = 0.0) -> list[float]:
        """Latencies of jobs that arrived after the warm-up, in the order of their arrival, in seconds."""
        counted = sorted((e for e in self.ended if e.job.at_s >= warmup_s), key=lambda e: e.job.at_s)
        return [ended.latency_s for ended in counted]


@dataclass(frozen=True)
class SimulationSummary:
    """A run in a few figures; latencies in seconds."""

    jobs: int
    """Jobs that arrived after the warm-up; the figures are theirs."""
    pictures: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    most_s: float
    waited_mean_s: float
    throughput_per_s: float
    """Counted jobs over the seconds from the end of the warm-up to the last end."""
    slo_share: float | None
    """Share of jobs with an SLO that met it."""
    utilisation: float
    """Share of time in which a worker computed, on average over workers."""
    utilisation_least: float
    utilisation_most: float
    rows_a_step: float
    queue_mean: float
    """Jobs in the router's line, seen once a second."""
    queue_most: int
    hits_memory: int
    hits_disk: int
    misses: int
    recorded: int
    lora_hit_share: float | None
    """Share of LoRAs in the memory or on the device of the worker, or on their way there, when rows with them came."""
    lora_wait_mean_s: float | None
    """Time that rows with LoRAs waited for these alone, on average over the times that such rows came."""
    lora_ready_share: float | None
    """Share of these times at which they did not wait."""
    lora_loads: float | None
    """Loads onto devices over uses. As the two above, after the warm-up."""

    @property
    def hit_share(self) -> float | None:
        """Share of jobs that may reuse whose template was there; None where there are no such jobs."""
        found = self.hits_memory + self.hits_disk
        return found / (found + self.misses) if found + self.misses else None


def summary(run: SimulatedRun, warmup_s: float = 0.0) -> SimulationSummary:
    """Sum up the jobs that arrived after the warm-up; the figures of workers are those of the whole run.

    Raises:
        ValueError: no job arrived after the warm-up.
    """
    counted = [ended for ended in run.ended if ended.job.at_s >= warmup_s]
    latency = spread([ended.latency_s for ended in counted])
    if latency is None:
        raise ValueError(f"none of {len(run.ended)} jobs arrives after the warm-up of {warmup_s:g} s")
    met = [e.latency_s <= e.job.slo_s for e in counted if e.job.slo_s is not None]
    used = [worker.busy_s / run.seconds for worker in run.workers]
    steps = sum(worker.steps for worker in run.workers)
    moments = [m.waiting for m in run.moments if m.at_s >= warmup_s] or [0]
    hits, lora_hits = (
        sum((count(worker) for worker in run.workers), Counter[Tier | None]())
        for count in (attrgetter("hits"), attrgetter("lora_hits"))
    )
    waits = [wait for worker in run.workers for wait in worker.waits if wait[0] >= warmup_s]
    loads = sum(at_s >= warmup_s for worker in run.workers for at_s, _ in worker.loaded)
    near = lora_hits[Tier.DEVICE] + lora_hits[Tier.MEMORY]
    return SimulationSummary(
        jobs=len(counted),
        pictures=sum(ended.job.demand.rows for ended in counted),
        mean_s=latency.mean,
        p50_s=latency.p50,
        p95_s=latency.p95,
        p99_s=latency.p99,
        most_s=latency.most,
        waited_mean_s=statistics.fmean(ended.waited_s for ended in counted),
        throughput_per_s=len(counted) / max(1e-9, run.seconds - warmup_s),
        slo_share=statistics.fmean(met) if met else None,
        utilisation=statistics.fmean(used),
        utilisation_least=min(used),
        utilisation_most=max(used),
        rows_a_step=sum(worker.row_steps for worker in run.workers) / max(1, steps),
        queue_mean=statistics.fmean(moments),
        queue_most=max(moments),
        hits_memory=hits[Tier.MEMORY],
        hits_disk=hits[Tier.DISK],
        misses=hits[None],
        recorded=sum(worker.recorded for worker in run.workers),
        lora_hit_share=near / lora_hits.total() if lora_hits else None,
        lora_wait_mean_s=statistics.fmean(s for _, s, _ in waits) if waits else None,
        lora_ready_share=statistics.fmean(s <= LEAST_WAIT_S for _, s, _ in waits) if waits else None,
        lora_loads=loads / sum(uses for *_, uses in waits) if waits else None,
    )


@dataclass(frozen=True)
class PolicyRun:
    """A run with what it is called."""

    policy: str
    rate: float
    seed: int
    run: SimulatedRun
    summary: SimulationSummary
    bound_p95_s: float | None
    bound_mean_s: float | None
    """Bounds for the same jobs; None: not asked for."""
    in_order: tuple[float, float, float] | None
    """Mean, P95 and P99 of :meth:`giornata_lab.simulation.bound.LatencyBound.in_order` for the same jobs, likewise."""


def paired(runs: Sequence[PolicyRun], others: Sequence[PolicyRun], field: str) -> tuple[float, float]:
    """How much larger a figure is in `runs` than in `others` with the same seeds: the mean share, its 95 % interval."""
    first = {run.seed: getattr(run.summary, field) for run in others}
    more = [getattr(run.summary, field) / first[run.seed] - 1 for run in runs]
    half = float(stdtrit(len(more) - 1, 0.975)) * statistics.stdev(more) / math.sqrt(len(more))
    return statistics.fmean(more), half


def charts(runs: Sequence[PolicyRun], warmup_s: float) -> dict[str, Chart]:
    """Charts by file name: curves of the first seed's runs; of several rates, figures against the rate."""
    first = [run for run in runs if run.seed == runs[0].seed]
    several = len({run.rate for run in runs}) > 1
    named = {f"{r.policy} {r.rate:g}/s" if several else r.policy: r.run for r in first}
    cdfs = {name: thinned(distribution(run.latencies(warmup_s))) for name, run in named.items()}
    found = {"latency_cdf.svg": Chart("Jobs ended within", "seconds", "share", cdfs, PointStyle.LINE)}
    return found | (_by_rate(runs) if several else {})


def _by_rate(runs: Sequence[PolicyRun]) -> dict[str, Chart]:
    latencies: dict[str, Points] = {}
    for name in ("p50_s", "p95_s", "p99_s"):
        means = _means(runs, lambda run, name=name: max(LEAST_S, getattr(run.summary, name)))  # type: ignore[misc]  # bound per turn
        latencies |= {f"{policy} {name[:3].upper()}": points for policy, points in means.items()}
    known = [run for run in runs if run.bound_p95_s is not None]
    if known:
        rates = sorted({run.rate for run in known})
        latencies["bound of P95"] = [
            (rate, max(LEAST_S, *(r.bound_p95_s or 0.0 for r in known if r.rate == rate))) for rate in rates
        ]
    chart = Chart("Latency against rate", "jobs a second", "seconds", latencies, logarithmic=True)
    return {"latency_by_rate.svg": chart}


def _means(runs: Sequence[PolicyRun], value: Callable[[PolicyRun], float]) -> dict[str, Points]:
    """The mean of `value` over seeds against the rate, for each policy."""
    return {
        policy: [
            (rate, statistics.fmean(value(run) for run in runs if (run.policy, run.rate) == (policy, rate)))
            for rate in sorted({run.rate for run in runs if run.policy == policy})
        ]
        for policy in dict.fromkeys(run.policy for run in runs)
    }
