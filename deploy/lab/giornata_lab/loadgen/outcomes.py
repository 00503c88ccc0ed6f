"""What became of requests: the figures of a run, its table, its charts, and its value for JSON. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from rich.table import Table

from giornata_lab.loadgen.charts import Chart, Points, PointStyle, distribution, thinned
from giornata_lab.loadgen.workload import WorkloadRequest
from giornata_tools.terminal import table as empty_table

NOT_SENT: Final = "too_many_in_flight"
"""Code of a request that was due while as many as allowed had no answer."""


@dataclass(frozen=True)
class ServerAnswer:
    """What a server answered."""

    pictures: int = 0
    code: str | None = None
    """Stable; None for a success."""
    message: str = ""
    """Why, where there is a code."""


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request; times in seconds from the start of the run."""

    request: WorkloadRequest
    ended_s: float
    """When the whole answer had come; of one that was not sent, when it was due."""
    answer: ServerAnswer
    sent_s: float | None = None
    """When it left; None: it was not sent."""
    in_flight: int = 0
    """Requests without an answer when it left, itself included."""

    @property
    def latency_s(self) -> float:
        """Seconds from when it was due until its answer had come: a late generator does not flatter the server."""
        return self.ended_s - self.request.at_s

    @property
    def late_s(self) -> float:
        """Return how much later than due it left; 0 where it was not sent."""
        return 0.0 if self.sent_s is None else self.sent_s - self.request.at_s


@dataclass(frozen=True)
class DistributionSummary:
    """The spread of several values, in their unit."""

    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one run; its warm-up is left out of all of them."""

    requests: int
    """Requests that were due, less the ones without an answer when the run was stopped."""
    unfinished: int
    """Requests without an answer when the run was stopped, or not due until then."""
    succeeded: int
    pictures: int
    offered_per_s: float
    """Requests that were due, a second."""
    throughput_per_s: float
    """Requests that succeeded, a second; the seconds run until the last of them had its answer."""
    pictures_per_s: float
    latency_s: DistributionSummary | None
    """Times of the requests that succeeded, from when they were due to their answers; None: none succeeded."""
    slo_s: float | None
    slo_share: float | None
    """Share of all requests that succeeded within `slo_s`: errors and requests that were not sent count against it."""
    goodput_per_s: float | None
    """The same, a second."""
    errors: dict[str, int]
    """Counts by code, the most frequent first."""
    late_s: DistributionSummary | None
    """How much later than due requests left: the generator's own failing."""
    in_flight: int
    """Most requests without an answer."""
    mask_ratio: float
    """Mean of the requests."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation; `values` in any order, at least one."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> DistributionSummary | None:
    """Mean and percentiles; None of no values."""
    if not values:
        return None
    p50, p95, p99 = (percentile(values, percent) for percent in (50, 95, 99))
    return DistributionSummary(statistics.fmean(values), p50, p95, p99, max(values))


def figures(
    requests: Sequence[WorkloadRequest],
    outcomes: Sequence[RequestOutcome],
    *,
    warmup_s: float,
    seconds: float,
    slo_s: float | None,
) -> LoadFigures:
    """Return what a run comes to whose `requests` have ended with `outcomes`, some of them maybe without one.

    Requests due before `warmup_s` are left out; `seconds` is the run's length after that. An answer within `slo_s`
    counts as goodput.
    """
    planned = [request for request in requests if request.at_s >= warmup_s]
    counted = [outcome for outcome in outcomes if outcome.request.at_s >= warmup_s]
    good = [outcome for outcome in counted if outcome.answer.code is None]
    met = None if slo_s is None else sum(outcome.latency_s <= slo_s for outcome in good)
    elapsed = max([seconds, *(outcome.ended_s - warmup_s for outcome in good)])
    codes = Counter(outcome.answer.code for outcome in counted if outcome.answer.code is not None)
    pictures = sum(outcome.answer.pictures for outcome in good)
    return LoadFigures(
        requests=len(counted),
        unfinished=len(planned) - len(counted),
        succeeded=len(good),
        pictures=pictures,
        offered_per_s=len(planned) / seconds,
        throughput_per_s=len(good) / elapsed,
        pictures_per_s=pictures / elapsed,
        latency_s=spread([outcome.latency_s for outcome in good]),
        slo_s=slo_s,
        slo_share=None if met is None else met / max(1, len(counted)),
        goodput_per_s=None if met is None else met / elapsed,
        errors=dict(codes.most_common()),
        late_s=spread([outcome.late_s for outcome in counted if outcome.sent_s is not None]),
        in_flight=max((outcome.in_flight for outcome in counted), default=0),
        mask_ratio=statistics.fmean(o.request.mask_ratio for o in counted) if counted else 0.0,
    )


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
