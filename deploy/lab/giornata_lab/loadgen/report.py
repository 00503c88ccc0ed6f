"""What a measurement leaves behind: a table, charts, and a value for JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.table import Table

from giornata_lab.loadgen.charts import Chart, Points, PointStyle, distribution, thinned
from giornata_lab.loadgen.outcomes import LoadFigures, RequestOutcome
from giornata_tools.terminal import table as empty_table

LATE_SHARE: Final = 0.05
"""A generator whose requests leave later than this share of the median latency is told of."""
LEAST_S: Final = 1e-4
"""A latency below it is drawn there: the axis is logarithmic."""
TITLE: Final = "Latencies in seconds, from when a request was due until its whole answer had come"
CAPTION: Final = (
    "in time, good/s: answered within --slo, of all requests and a second; late ms: how late the generator sent (P99); "
    "waiting: most requests without an answer; x: the other server's figure over this one's"
)


@dataclass(frozen=True)
class MeasuredRun:
    """One server under one load."""

    target: str
    """What the server is called."""
    rate: float | None
    """Requests a second that were asked for; None: a trace says when they are due."""
    warmup_s: float
    outcomes: tuple[RequestOutcome, ...]
    figures: LoadFigures

    @property
    def arrivals(self) -> str:
        """Return how requests came, for people."""
        return "trace" if self.rate is None else f"{self.rate:g}/s"


def table(runs: Sequence[MeasuredRun]) -> Table:
    """A line for each run; ratios are to the other server's run at the same rate, where there are two."""
    lines = [_cells(run, runs) for run in runs]
    drawn = empty_table(*lines[0], numbers=lines[0].keys() - {"server"}, title=TITLE)
    drawn.caption, drawn.caption_justify = CAPTION, "left"
    for line in lines:
        drawn.add_row(*line.values())
    return drawn


def notes(runs: Sequence[MeasuredRun]) -> list[str]:
    """Sentences about what a table does not show: errors by code, what had no answer, a slow generator."""
    told = []
    for run in runs:
        name, found = f"{run.target}, {run.arrivals}", run.figures
        messages = {o.answer.code: o.answer.message for o in reversed(run.outcomes) if o.answer.code}
        told += [f"{name}: {count} x {code}: {messages[code]}" for code, count in found.errors.items()]
        if found.unfinished:
            told.append(f"{name}: {found.unfinished} requests were given up without an answer or not sent.")
        if found.late_s and found.latency_s and found.late_s.p99 > LATE_SHARE * found.latency_s.p50:
            told.append(
                f"{name}: the generator itself was slow: requests left up to {found.late_s.most * 1000:.0f} ms late."
            )
    return told


def charts(runs: Sequence[MeasuredRun]) -> dict[str, Chart]:
    """Charts by file name: of every run, and where there are several rates, figures against the rate.

    Lines without points are left out, and charts without lines.
    """
    several = len({run.target for run in runs}) > 1
    shares = {
        f"{run.target} {run.arrivals}" if several else run.arrivals: thinned(distribution(_latencies(run)))
        for run in runs
    }
    found = {
        "latency_cdf.svg": Chart("Requests answered within", "seconds", "share", shares, PointStyle.LINE)
    }
    if len({run.rate for run in runs}) > 1:
        found["latency_by_rate.svg"] = Chart(
            "Latency against rate", "requests due a second", "seconds", _by_rate(runs), logarithmic=True
        )
    kept = {
        name: replace(chart, lines={line: points for line, points in chart.lines.items() if points})
        for name, chart in found.items()
    }
    return {name: chart for name, chart in kept.items() if chart.lines}


def value(run: MeasuredRun) -> dict[str, Any]:
    """A run for JSON: its figures and every request."""
    return {
        "target": run.target,
        "rate": run.rate,
        "warmup_s": run.warmup_s,
        "figures": _rounded(asdict(run.figures)),
        "requests": [_rounded(_request(outcome)) for outcome in run.outcomes],
    }


def _request(outcome: RequestOutcome) -> dict[str, Any]:
    return {
        **asdict(outcome.request),
        "sent_s": outcome.sent_s,
        "ended_s": outcome.ended_s,
        "pictures": outcome.answer.pictures,
        "error": outcome.answer.code,
        "message": outcome.answer.message or None,
    }


def _cells(run: MeasuredRun, runs: Sequence[MeasuredRun]) -> dict[str, str]:
    """Cells by column; all `runs` have the same ones."""
    found, several = run.figures, len({one.target for one in runs}) > 1
    return {
        **({"server": run.target} if several else {}),
        "rate": run.arrivals,
        "requests": str(found.requests),
        "errors": str(sum(found.errors.values())),
        **{name: _number(_latency(run, name)) for name in ("mean", "P50", "P95", "P99")},
        "served/s": _number(found.throughput_per_s),
        **({} if found.slo_share is None else {"in time": f"{100 * found.slo_share:.1f} %"}),
        **({} if found.slo_s is None else {"good/s": _number(found.goodput_per_s)}),
        "late ms": _number(found.late_s.p99 * 1000 if found.late_s else None),
        "waiting": str(found.in_flight),
        **({f"x {name}": _ratio(run, runs, name) for name in ("mean", "P95")} if several else {}),
    }


def _ratio(run: MeasuredRun, runs: Sequence[MeasuredRun], name: str) -> str:
    """Return how many times as long the other server takes."""
    others = [other for other in runs if other.rate == run.rate and other.target != run.target]
    own, theirs = _latency(run, name), [_latency(other, name) for other in others]
    if own is None or len(theirs) != 1 or theirs[0] is None:
        return ""
    return f"{theirs[0] / max(own, 1e-9):.2f}"


def _latency(run: MeasuredRun, name: str) -> float | None:
    return getattr(run.figures.latency_s, name.lower(), None)


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def _rounded(told: Any) -> Any:
    if isinstance(told, float):
        return round(told, 4)
    if isinstance(told, Mapping):
        return {name: _rounded(item) for name, item in told.items()}
    return told


def _latencies(run: MeasuredRun) -> list[float]:
    """Of what succeeded after the warm-up."""
    counted = (outcome for outcome in run.outcomes if outcome.request.at_s >= run.warmup_s)
    return [max(LEAST_S, outcome.latency_s) for outcome in counted if outcome.answer.code is None]


def _by_rate(runs: Sequence[MeasuredRun]) -> dict[str, Points]:
    """A line for each target and percentile, named after both: the figure of its runs against their rate."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        if run.figures.latency_s is not None:
            for name in ("p50", "p95", "p99"):
                point = (run.rate or 0.0, max(LEAST_S, getattr(run.figures.latency_s, name)))
                lines.setdefault(f"{run.target} {name.upper()}", []).append(point)
    return dict(lines)
