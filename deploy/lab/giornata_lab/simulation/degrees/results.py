"""What runs of a simulated pool come to, and their charts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from giornata_lab.loadgen.charts import Chart, Points, PointStyle, distribution, thinned
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.simulation.degrees.workloads import PoolWorkload
from giornata_lab.simulation.degrees.world import PoolRowOutcome

BOUND: Final = "bound"
"""What the bound's line is called."""


@dataclass(frozen=True)
class PoolSummary:
    """A run in a few figures; latencies in seconds."""

    rows: int
    met: int
    """Rows that ended by their deadlines."""
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    most_s: float
    busy: float
    """Share of the devices' time, from the first arrival to the last end, in which they computed."""
    moved: float
    """Share of decisions' steps on other devices than the row's step before."""
    decisions: int

    @property
    def attainment(self) -> float:
        """Share of rows that ended in time."""
        return self.met / self.rows


@dataclass(frozen=True)
class PoolRun:
    """A workload served by a rule, or what no rule can beat on it."""

    rule: str
    workload: PoolWorkload
    summary: PoolSummary
    outcomes: tuple[PoolRowOutcome, ...]
    """In the order of arrival."""


def summarise(outcomes: Sequence[PoolRowOutcome], devices: int, decisions: int) -> PoolSummary:
    """Sum up a run.

    Raises:
        ValueError: it has no rows.
    """
    if not outcomes:
        raise ValueError("a run needs one request or more")
    latencies = [outcome.latency_s for outcome in outcomes]
    first = min(outcome.request.at_s for outcome in outcomes)
    seconds = max(outcome.end_s for outcome in outcomes) - first
    steps = sum(outcome.degrees.total() for outcome in outcomes)
    return PoolSummary(
        rows=len(outcomes),
        met=sum(outcome.met for outcome in outcomes),
        mean_s=statistics.fmean(latencies),
        p50_s=percentile(latencies, 50),
        p95_s=percentile(latencies, 95),
        p99_s=percentile(latencies, 99),
        most_s=max(latencies),
        busy=sum(outcome.device_s for outcome in outcomes) / devices / seconds,
        moved=sum(outcome.moves for outcome in outcomes) / steps,
        decisions=decisions,
    )


def by_side(outcomes: Iterable[PoolRowOutcome]) -> Mapping[int, float]:
    """Attainment by pixels a side."""
    met: dict[int, list[bool]] = {}
    for outcome in outcomes:
        met.setdefault(outcome.request.size.side, []).append(outcome.met)
    return {side: statistics.fmean(met[side]) for side in sorted(met)}


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of `values`; 0 of one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


Bounds = Mapping[PoolWorkload, float]
"""The greatest attainment of workloads; those that are absent have none."""


def charts(runs: Sequence[PoolRun], bounds: Bounds) -> dict[str, Chart]:
    """Charts by file name: attainment over what varies, latencies and resolutions of each mix or trace."""
    found: dict[str, Chart] = {}
    for mix in dict.fromkeys(run.workload.name for run in runs):
        mine = [run for run in runs if run.workload.name == mix]
        for name, title, over in (
            ("scale", "SLO scale", lambda load: load.scale),
            ("rate", "pictures a minute", lambda load: load.per_minute),
        ):
            lines = attainment_lines(mine, bounds, over)
            if any(len(points) > 1 for points in lines.values()):
                found[f"attainment_by_{name}_{mix}.svg"] = Chart(
                    f"Deadlines kept, {mix}", title, "share", lines
                )
        found[f"latency_cdf_{mix}.svg"] = Chart(
            f"Pictures ended within, {mix}", "seconds", "share", latency_lines(mine), PointStyle.LINE
        )
        found[f"attainment_by_side_{mix}.svg"] = Chart(
            f"Deadlines kept by resolution, {mix}", "pixels a side", "share", side_lines(mine)
        )
    return found


def attainment_lines(
    runs: Sequence[PoolRun], bounds: Bounds, over: Callable[[PoolWorkload], float]
) -> dict[str, Points]:
    """Mean attainment of each rule, and of the bound, over a quantity of the workload."""
    lines: dict[str, Points] = {}
    for rule in dict.fromkeys(run.rule for run in runs):
        lines[rule] = _means((over(run.workload), run.summary.attainment) for run in runs if run.rule == rule)
    known = dict.fromkeys(run.workload for run in runs if run.workload in bounds)
    if known:
        lines[BOUND] = _means((over(workload), bounds[workload]) for workload in known)
    return lines


def latency_lines(runs: Sequence[PoolRun]) -> dict[str, Points]:
    """Shares of all rows of a rule that ended within a time."""
    ended: dict[str, list[float]] = {}
    for run in runs:
        ended.setdefault(run.rule, []).extend(outcome.latency_s for outcome in run.outcomes)
    return {rule: thinned(distribution(latencies)) for rule, latencies in ended.items()}


def side_lines(runs: Sequence[PoolRun]) -> dict[str, Points]:
    """Attainment of a rule by pixels a side."""
    ended: dict[str, list[PoolRowOutcome]] = {}
    for run in runs:
        ended.setdefault(run.rule, []).extend(run.outcomes)
    return {
        rule: [(float(side), share) for side, share in by_side(outcomes).items()]
        for rule, outcomes in ended.items()
    }


def _means(points: Iterable[tuple[float, float]]) -> Points:
    gathered: dict[float, list[float]] = {}
    for x, y in points:
        gathered.setdefault(x, []).append(y)
    return [(x, statistics.fmean(gathered[x])) for x in sorted(gathered)]
