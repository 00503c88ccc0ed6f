"""The charts of a report: latencies of a run, and their percentiles against the rate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from giornata_tools.loadgen.charts import Drawn, Points, distribution, svg, thinned
from giornata_tools.loadgen.report import Run
from giornata_tools.loadgen.statistics import Figures

LEAST_S = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""


def charts(runs: Sequence[Run]) -> dict[str, str]:
    """SVG by file name: of every run, and where there are several rates, figures against the rate.

    Charts that nothing succeeded for are left out.
    """
    names = _names(runs)
    lines = {name: _latencies(run) for name, run in zip(names, runs, strict=True)}
    found = {
        "latency_cdf.svg": _drawn(
            "Requests answered within", "seconds", "share", {n: _cdf(p) for n, p in lines.items()}, Drawn.LINE
        ),
        "latency_over_time.svg": _drawn(
            "Latency of requests", "due after seconds", "seconds", lines, Drawn.DOTS, logarithmic=True
        ),
    }
    if len({run.rate for run in runs}) > 1:
        found["latency_by_rate.svg"] = _drawn(
            "Latency against rate", "requests due a second", "seconds", _percentiles(runs), logarithmic=True
        )
        found["throughput_by_rate.svg"] = _drawn(
            "What was served", "requests due a second", "requests a second", _served(runs)
        )
        found["slo_by_rate.svg"] = _drawn(
            "Requests within the limit", "requests due a second", "share", _shares(runs)
        )
    return {name: chart for name, chart in found.items() if chart}


def _drawn(
    title: str,
    across: str,
    up: str,
    lines: Mapping[str, Points],
    drawn: Drawn = Drawn.BOTH,
    *,
    logarithmic: bool = False,
) -> str:
    """A chart of the lines that have points; empty where none has."""
    kept = {name: points for name, points in lines.items() if points}
    return svg(title, across, up, kept, logarithmic=logarithmic, drawn=drawn) if kept else ""


def _names(runs: Sequence[Run]) -> list[str]:
    """What each run is called: by what it differs in from others."""
    several = len({run.target for run in runs}) > 1
    return [
        " ".join([*([run.target] if several else []), f"{run.rate:g}/s" if run.rate else "trace"])
        for run in runs
    ]


def _latencies(run: Run) -> Points:
    """(seconds after the warm-up, latency) of what succeeded."""
    return [
        (outcome.request.at_s - run.warmup_s, max(LEAST_S, outcome.latency_s))
        for outcome in sorted(run.outcomes, key=lambda outcome: outcome.request.at_s)
        if outcome.answer.code is None and outcome.request.at_s >= run.warmup_s
    ]


def _cdf(points: Points) -> Points:
    return thinned(distribution(latency for _, latency in points))


def _percentiles(runs: Sequence[Run]) -> dict[str, Points]:
    return {
        f"{target} {name.upper()}": points
        for target in dict.fromkeys(run.target for run in runs)
        for name in ("p50", "p95", "p99")
        if (points := _of(runs, target, partial(_percentile, name)))
    }


def _percentile(name: str, figures: Figures) -> float | None:
    return None if figures.latency_s is None else max(LEAST_S, getattr(figures.latency_s, name))


def _served(runs: Sequence[Run]) -> dict[str, Points]:
    kinds: dict[str, Callable[[Figures], float | None]] = {
        "throughput": lambda figures: figures.throughput_per_s,
        "goodput": lambda figures: figures.goodput_per_s,
    }
    return {
        f"{target} {name}": _of(runs, target, kind)
        for target in dict.fromkeys(run.target for run in runs)
        for name, kind in kinds.items()
    }


def _shares(runs: Sequence[Run]) -> dict[str, Points]:
    return {
        target: _of(runs, target, lambda figures: figures.slo_share)
        for target in dict.fromkeys(run.target for run in runs)
    }


def _of(runs: Sequence[Run], target: str, kind: Callable[[Figures], float | None]) -> Points:
    values = [(run.rate or 0.0, kind(run.figures)) for run in runs if run.target == target]
    return [(rate, value) for rate, value in sorted(values) if value is not None]
