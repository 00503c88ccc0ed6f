"""The charts of a report: latencies of a run, and their percentiles against the rate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

from giornata_tools.loadgen.charts import Chart, Drawn, Points, distribution, thinned
from giornata_tools.loadgen.outcomes import Figures
from giornata_tools.loadgen.report import MeasuredRun

LEAST_S: Final = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""


def charts(runs: Sequence[MeasuredRun]) -> dict[str, Chart]:
    """Charts by file name: of every run, and where there are several rates, figures against the rate.

    Lines without points are left out, and charts without lines.
    """
    several = len({run.target for run in runs}) > 1
    lines = {f"{run.target} {run.arrivals}" if several else run.arrivals: _latencies(run) for run in runs}
    shares = {name: thinned(distribution(y for _, y in points)) for name, points in lines.items()}
    found = {
        "latency_cdf.svg": Chart("Requests answered within", "seconds", "share", shares, Drawn.LINE),
        "latency_over_time.svg": Chart(
            "Latency of requests", "due after seconds", "seconds", lines, Drawn.DOTS, logarithmic=True
        ),
    }
    if len({run.rate for run in runs}) > 1:
        rate = "requests due a second"
        percentiles = {f" {name.upper()}": partial(_latency, name) for name in ("p50", "p95", "p99")}
        served = {f" {name}": attrgetter(f"{name}_per_s") for name in ("throughput", "goodput")}
        in_time = {"": attrgetter("slo_share")}
        found |= {
            "latency_by_rate.svg": Chart(
                "Latency against rate", rate, "seconds", _by_rate(runs, percentiles), logarithmic=True
            ),
            "throughput_by_rate.svg": Chart(
                "What was served", rate, "requests a second", _by_rate(runs, served)
            ),
            "slo_by_rate.svg": Chart("Requests within the limit", rate, "share", _by_rate(runs, in_time)),
        }
    kept = {
        name: replace(chart, lines={line: points for line, points in chart.lines.items() if points})
        for name, chart in found.items()
    }
    return {name: chart for name, chart in kept.items() if chart.lines}


def _latencies(run: MeasuredRun) -> Points:
    """(seconds after the warm-up, latency) of what succeeded."""
    return [
        (outcome.request.at_s - run.warmup_s, max(LEAST_S, outcome.latency_s))
        for outcome in sorted(run.outcomes, key=lambda outcome: outcome.request.at_s)
        if outcome.answer.code is None and outcome.request.at_s >= run.warmup_s
    ]


def _latency(name: str, figures: Figures) -> float | None:
    return None if figures.latency_s is None else max(LEAST_S, getattr(figures.latency_s, name))


def _by_rate(
    runs: Sequence[MeasuredRun], kinds: Mapping[str, Callable[[Figures], float | None]]
) -> dict[str, Points]:
    """A line for each target and kind of figure, named after both: the figure of its runs against their rate."""
    lines: dict[str, Points] = {}
    for target in dict.fromkeys(run.target for run in runs):
        for kind, figure in kinds.items():
            values = [(run.rate or 0.0, figure(run.figures)) for run in runs if run.target == target]
            lines[target + kind] = [(rate, value) for rate, value in sorted(values) if value is not None]
    return lines
