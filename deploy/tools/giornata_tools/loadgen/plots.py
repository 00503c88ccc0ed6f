"""The charts of a report: latencies of a run, and their percentiles against the rate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from giornata_tools.loadgen.charts import Chart, Drawn, Points, distribution, thinned
from giornata_tools.loadgen.report import MeasuredRun
from giornata_tools.loadgen.statistics import Figures

LEAST_S = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""


def charts(runs: Sequence[MeasuredRun]) -> dict[str, Chart]:
    """Charts by file name: of every run, and where there are several rates, figures against the rate.

    Lines without points are left out, and charts without lines.
    """
    lines = {name: _latencies(run) for name, run in zip(_names(runs), runs, strict=True)}
    shares = {name: _cdf(points) for name, points in lines.items()}
    found = {
        "latency_cdf.svg": Chart("Requests answered within", "seconds", "share", shares, Drawn.LINE),
        "latency_over_time.svg": Chart(
            "Latency of requests", "due after seconds", "seconds", lines, Drawn.DOTS, logarithmic=True
        ),
    }
    if len({run.rate for run in runs}) > 1:
        rate = "requests due a second"
        found |= {
            "latency_by_rate.svg": Chart(
                "Latency against rate", rate, "seconds", _percentiles(runs), logarithmic=True
            ),
            "throughput_by_rate.svg": Chart("What was served", rate, "requests a second", _served(runs)),
            "slo_by_rate.svg": Chart("Requests within the limit", rate, "share", _shares(runs)),
        }
    kept = {name: replace(chart, lines=_with_points(chart.lines)) for name, chart in found.items()}
    return {name: chart for name, chart in kept.items() if chart.lines}


def _with_points(lines: Mapping[str, Points]) -> dict[str, Points]:
    return {name: points for name, points in lines.items() if points}


def _names(runs: Sequence[MeasuredRun]) -> list[str]:
    """What each run is called: by what it differs in from others."""
    several = len({run.target for run in runs}) > 1
    return [
        " ".join([*([run.target] if several else []), f"{run.rate:g}/s" if run.rate else "trace"])
        for run in runs
    ]


def _latencies(run: MeasuredRun) -> Points:
    """(seconds after the warm-up, latency) of what succeeded."""
    return [
        (outcome.request.at_s - run.warmup_s, max(LEAST_S, outcome.latency_s))
        for outcome in sorted(run.outcomes, key=lambda outcome: outcome.request.at_s)
        if outcome.answer.code is None and outcome.request.at_s >= run.warmup_s
    ]


def _cdf(points: Points) -> Points:
    return thinned(distribution(latency for _, latency in points))


def _percentiles(runs: Sequence[MeasuredRun]) -> dict[str, Points]:
    return {
        f"{target} {name.upper()}": _of(runs, target, partial(_percentile, name))
        for target in _targets(runs)
        for name in ("p50", "p95", "p99")
    }


def _percentile(name: str, figures: Figures) -> float | None:
    return None if figures.latency_s is None else max(LEAST_S, getattr(figures.latency_s, name))


def _served(runs: Sequence[MeasuredRun]) -> dict[str, Points]:
    return {
        f"{target} {name}": _of(runs, target, attrgetter(f"{name}_per_s"))
        for target in _targets(runs)
        for name in ("throughput", "goodput")
    }


def _shares(runs: Sequence[MeasuredRun]) -> dict[str, Points]:
    return {target: _of(runs, target, attrgetter("slo_share")) for target in _targets(runs)}


def _targets(runs: Sequence[MeasuredRun]) -> list[str]:
    return list(dict.fromkeys(run.target for run in runs))


def _of(runs: Sequence[MeasuredRun], target: str, kind: Callable[[Figures], float | None]) -> Points:
    values = [(run.rate or 0.0, kind(run.figures)) for run in runs if run.target == target]
    return [(rate, value) for rate, value in sorted(values) if value is not None]
