"""What a measurement leaves behind: a table, and a value for JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

from giornata_tools.loadgen.outcomes import Outcome
from giornata_tools.loadgen.statistics import Figures, Spread

LATE_SHARE: Final = 0.05
"""A generator whose requests leave later than this share of the median latency is told of."""
DIGITS: Final = 4
WIDTH: Final = 120
"""Columns that a table needs."""
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
    outcomes: tuple[Outcome, ...]
    figures: Figures


def table(runs: Sequence[MeasuredRun]) -> Table:
    """A line for each run; ratios are to the other server's run at the same rate, where there are two."""
    several = len({run.target for run in runs}) > 1
    slo = runs[0].figures.slo_s is not None
    columns = [
        *(["server"] if several else []),
        *("rate", "requests", "errors", "mean", "P50", "P95", "P99", "served/s"),
        *(["in time", "good/s"] if slo else []),
        *("late ms", "waiting"),
        *(["x mean", "x P95"] if several else []),
    ]
    drawn = Table(title=TITLE, caption=CAPTION, box=SIMPLE, pad_edge=False, collapse_padding=True)
    for column in columns:
        drawn.add_column(column, justify="left" if column == "server" else "right", no_wrap=True)
    for run in runs:
        drawn.add_row(*_cells(run, runs, several=several))
    return drawn


def notes(runs: Sequence[MeasuredRun]) -> list[str]:
    """Sentences about what a table does not show: errors by code, what had no answer, a slow generator."""
    told = []
    for run in runs:
        name, found = f"{run.target}, {_rate(run)}", run.figures
        messages = {o.answer.code: o.answer.message for o in reversed(run.outcomes) if o.answer.code}
        told += [f"{name}: {count} x {code}: {messages[code]}" for code, count in found.errors.items()]
        if found.unfinished:
            told.append(f"{name}: {found.unfinished} requests were given up without an answer or not sent.")
        if found.late_s and found.latency_s and found.late_s.p99 > LATE_SHARE * found.latency_s.p50:
            told.append(
                f"{name}: the generator itself was slow: requests left up to {found.late_s.most * 1000:.0f} ms late."
            )
    return told


def value(run: MeasuredRun) -> dict[str, Any]:
    """A run for JSON: its figures and every request."""
    return {
        "target": run.target,
        "rate": run.rate,
        "warmup_s": run.warmup_s,
        "figures": _rounded(asdict(run.figures)),
        "requests": [_request(outcome) for outcome in run.outcomes],
    }


def _request(outcome: Outcome) -> dict[str, Any]:
    asked = asdict(outcome.request)
    told = {
        "sent_s": outcome.sent_s,
        "ended_s": outcome.ended_s,
        "pictures": outcome.answer.pictures,
        "error": outcome.answer.code,
        "message": outcome.answer.message or None,
    }
    return dict(_rounded({**asked, **told}))


def _cells(run: MeasuredRun, runs: Sequence[MeasuredRun], *, several: bool) -> list[str]:
    found = run.figures
    latency = found.latency_s
    slo = [_share(found.slo_share), _number(found.goodput_per_s)] if found.slo_s is not None else []
    ratios = _ratios(run, runs) if several else []
    return [
        *([run.target] if several else []),
        _rate(run),
        str(found.requests),
        str(sum(found.errors.values())),
        *(_number(getattr(latency, name) if latency else None) for name in ("mean", "p50", "p95", "p99")),
        _number(found.throughput_per_s),
        *slo,
        _number(found.late_s.p99 * 1000 if found.late_s else None),
        str(found.in_flight),
        *ratios,
    ]


def _ratios(run: MeasuredRun, runs: Sequence[MeasuredRun]) -> list[str]:
    """How many times as long the other server takes."""
    others = [other for other in runs if other.rate == run.rate and other.target != run.target]
    latencies = [other.figures.latency_s for other in others]
    if len(latencies) != 1 or latencies[0] is None or run.figures.latency_s is None:
        return ["", ""]
    other, own = latencies[0], run.figures.latency_s
    return [f"{_ratio(other, own, name):.2f}" for name in ("mean", "p95")]


def _ratio(other: Spread, own: Spread, name: str) -> float:
    return float(getattr(other, name) / max(getattr(own, name), 1e-9))


def _rate(run: MeasuredRun) -> str:
    return "trace" if run.rate is None else f"{run.rate:g}/s"


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _rounded(told: Any) -> Any:
    if isinstance(told, float):
        return round(told, DIGITS)
    if isinstance(told, Mapping):
        return {name: _rounded(item) for name, item in told.items()}
    return told
