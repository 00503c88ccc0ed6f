"""The charts of simulated runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from giornata_tools.loadgen.charts import Drawn, Points, distribution, svg, thinned
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
    """Of the same jobs; None: not asked for."""


def charts(runs: Sequence[Simulated], warmup_s: float) -> dict[str, str]:
    """SVG by file name: curves of the first seed's runs; of several rates, figures against the rate."""
    first = [run for run in runs if run.seed == runs[0].seed]
    several = len({run.rate for run in runs}) > 1
    names = {id(r): f"{r.policy} {r.rate:g}/s" if several else r.policy for r in first}
    cdfs = {names[id(r)]: thinned(distribution(r.run.latencies(warmup_s))) for r in first}
    queues = {names[id(r)]: thinned([(m.at_s, float(m.waiting)) for m in r.run.moments]) for r in first}
    inside = {names[id(r)]: thinned([(m.at_s, float(m.unfinished)) for m in r.run.moments]) for r in first}
    found = {
        "latency_cdf.svg": svg(
            "Jobs ended within", "seconds", "share", cdfs, logarithmic=False, drawn=Drawn.LINE
        ),
        "queue.svg": svg(
            "Jobs in the router's line", "seconds", "jobs", queues, logarithmic=False, drawn=Drawn.LINE
        ),
        "unfinished.svg": svg(
            "Unfinished jobs", "seconds", "jobs", inside, logarithmic=False, drawn=Drawn.LINE
        ),
    }
    if several:
        found |= _by_rate(runs)
    return found


def _by_rate(runs: Sequence[Simulated]) -> dict[str, str]:
    latencies: dict[str, Points] = {}
    for name in ("p50_s", "p95_s", "p99_s"):
        latencies |= {f"{policy} {name[:3].upper()}": points for policy, points in _means(runs, name).items()}
    known = [run for run in runs if run.bound_p95_s is not None]
    if known:
        rates = sorted({run.rate for run in known})
        latencies["bound of P95"] = [
            (rate, max(LEAST_S, *(r.bound_p95_s or 0.0 for r in known if r.rate == rate))) for rate in rates
        ]
    shares = {f"{policy}": points for policy, points in _means(runs, "utilisation").items()}
    hits: dict[str, Points] = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        hits[policy] = [
            (
                rate,
                sum(_hit_share(r.summary) for r in mine if r.rate == rate)
                / sum(r.rate == rate for r in mine),
            )
            for rate in sorted({r.rate for r in mine})
        ]
    return {
        "latency_by_rate.svg": svg("Latency against rate", "jobs a second", "seconds", latencies),
        "utilisation_by_rate.svg": svg(
            "Share of time in which workers compute", "jobs a second", "share", shares, logarithmic=False
        ),
        "hits_by_rate.svg": svg(
            "Jobs that found their template", "jobs a second", "share", hits, logarithmic=False
        ),
    }


def _means(runs: Sequence[Simulated], name: str) -> Mapping[str, Points]:
    """By policy: a figure's mean over seeds, against the rate."""
    found: dict[str, Points] = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        found[policy] = [
            (rate, max(LEAST_S, sum(values) / len(values)))
            for rate in sorted({run.rate for run in mine})
            for values in [[getattr(run.summary, name) for run in mine if run.rate == rate]]
        ]
    return found


def _hit_share(figures: Summary) -> float:
    found = figures.hits_memory + figures.hits_disk
    return found / max(1, found + figures.misses)
