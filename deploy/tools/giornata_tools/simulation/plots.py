"""The charts of simulated runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from giornata_tools.loadgen.charts import Chart, Drawn, Points, distribution, thinned
from giornata_tools.simulation.results import SimulatedRun, Summary

LEAST_S = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""


@dataclass(frozen=True)
class Simulated:
    """A run with what it is called."""

    policy: str
    rate: float
    seed: int
    run: SimulatedRun
    summary: Summary
    bound_p95_s: float | None
    bound_mean_s: float | None
    """Bounds for the same jobs; None: not asked for."""


def charts(runs: Sequence[Simulated], warmup_s: float) -> dict[str, Chart]:
    """Charts by file name: curves of the first seed's runs; of several rates, figures against the rate."""
    first = [run for run in runs if run.seed == runs[0].seed]
    several = len({run.rate for run in runs}) > 1
    named = {f"{r.policy} {r.rate:g}/s" if several else r.policy: r.run for r in first}
    cdfs = {name: thinned(distribution(run.latencies(warmup_s))) for name, run in named.items()}
    queues, unfinished = (
        {name: thinned([(m.at_s, float(count(m))) for m in run.moments]) for name, run in named.items()}
        for count in (attrgetter("waiting"), attrgetter("unfinished"))
    )
    found = {
        "latency_cdf.svg": Chart("Jobs ended within", "seconds", "share", cdfs, Drawn.LINE),
        "queue.svg": Chart("Jobs in the router's line", "seconds", "jobs", queues, Drawn.LINE),
        "unfinished.svg": Chart("Unfinished jobs", "seconds", "jobs", unfinished, Drawn.LINE),
    }
    return found | (_by_rate(runs) if several else {})


def _by_rate(runs: Sequence[Simulated]) -> dict[str, Chart]:
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
    shares = _means(runs, lambda run: run.summary.utilisation)
    hits = _means(runs, lambda run: run.summary.hit_share)
    rate = "jobs a second"
    return {
        "latency_by_rate.svg": Chart("Latency against rate", rate, "seconds", latencies, logarithmic=True),
        "utilisation_by_rate.svg": Chart("Share of time in which workers compute", rate, "share", shares),
        "hits_by_rate.svg": Chart("Jobs that found their template", rate, "share", hits),
    }


def _means(runs: Sequence[Simulated], value: Callable[[Simulated], float]) -> dict[str, Points]:
    """The mean of `value` over seeds against the rate, for each policy."""
    return {
        policy: [
            (rate, fmean(value(run) for run in runs if (run.policy, run.rate) == (policy, rate)))
            for rate in sorted({run.rate for run in runs if run.policy == policy})
        ]
        for policy in dict.fromkeys(run.policy for run in runs)
    }
