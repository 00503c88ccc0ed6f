"""The table of ``giornata simulate``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rich.table import Table

from giornata_tools.simulation.results import Simulated, Summary


def table(runs: Sequence[Simulated]) -> Table:
    """Means over seeds, with the spread of P95."""
    drawn = Table(title="Latency in seconds; means over seeds, ± half the range")
    for column in (
        "jobs/s",
        "policy",
        "mean",
        "P50",
        "P95",
        "P99",
        "gap",
        "utilisation",
        "rows/step",
        "queue",
        "hits",
    ):
        drawn.add_column(column, justify="left" if column == "policy" else "right")
    for rate in dict.fromkeys(run.rate for run in runs):
        for policy in dict.fromkeys(run.policy for run in runs):
            mine = [run for run in runs if (run.rate, run.policy) == (rate, policy)]
            drawn.add_row(named(rate), policy, *_figures(mine))
        known = [run for run in runs if run.rate == rate and run.bound_p95_s is not None]
        if known:
            mean, p95 = (fmean(b or 0.0 for b in bounds) for bounds in _bounds(known))
            drawn.add_row(named(rate), "bound", f"{mean:.2f}", "", f"{p95:.2f}", end_section=True)
    return drawn


def _bounds(runs: Sequence[Simulated]) -> tuple[list[float | None], list[float | None]]:
    return [run.bound_mean_s for run in runs], [run.bound_p95_s for run in runs]


def _figures(runs: Sequence[Simulated]) -> list[str]:
    def mean(value: Callable[[Summary], float]) -> float:
        return fmean(value(run.summary) for run in runs)

    p95 = [run.summary.p95_s for run in runs]
    bound = fmean(run.bound_p95_s or 0.0 for run in runs)
    looked_up = mean(lambda s: s.hits_memory + s.hits_disk + s.misses)
    hits = mean(lambda s: s.hits_memory + s.hits_disk)
    return [
        f"{mean(lambda s: s.mean_s):.2f}",
        f"{mean(lambda s: s.p50_s):.2f}",
        f"{fmean(p95):.2f}" + (f" ± {(max(p95) - min(p95)) / 2:.2f}" if len(p95) > 1 else ""),
        f"{mean(lambda s: s.p99_s):.2f}",
        f"{fmean(p95) / bound - 1:+.0%}" if bound else "",
        f"{mean(lambda s: s.utilisation):.0%}",
        f"{mean(lambda s: s.rows_a_step):.2f}",
        f"{mean(lambda s: s.queue_mean):.1f}",
        f"{hits / looked_up:.0%}" if looked_up else "",
    ]


def named(rate: float) -> str:
    """A rate; 0 stands for a trace."""
    return f"{rate:g}" if rate else "trace"
