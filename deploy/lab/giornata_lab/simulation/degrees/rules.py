"""All rules of a simulated pool, by name and with their switches, and runs of them."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Final

from giornata.scheduling.degrees.pool import DEGREES, Devices, PoolRule, device_subsets
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.simulation.degrees import step_times
from giornata_lab.simulation.degrees.baselines import (
    EventDrivenRule,
    FixedDegrees,
    RoundBasedRule,
    TieBreak,
)
from giornata_lab.simulation.degrees.bound import FluidTask, most_in_time
from giornata_lab.simulation.degrees.step_times import TETRISERVE, StepFormula
from giornata_lab.simulation.degrees.workloads import (
    LARGEST,
    SHAPE_TOKENS,
    PoolRowSize,
    PoolWorkload,
    tokens_of,
)
from giornata_lab.simulation.degrees.world import PoolRowOutcome, PoolWorld


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
    """A workload served by a rule."""

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


POWERS: Final = (1, 2, 4, 8)
"""Degrees of TetriServe and its baselines."""
BEST_DEGREES: Final = {256: 1, 512: 1, 1024: 2, 2048: 8}
"""TetriServe's best fixed degree by pixels a side (RSSP, section 6.1)."""
BOUND_LIMIT_S: Final = 20.0
"""How long a program of the bound may take; beyond it counts what it has proved, which is no less."""


class RuleName(StrEnum):
    """Rules that can be simulated."""

    REPLANNING = "replanning"
    """Ours."""
    EVENTS = "events"
    """Algorithm 1 at every event."""
    ROUNDS = "rounds"
    """Algorithm 1 in rounds, as published."""
    RESOLUTION = "resolution"
    """The best degree by resolution, in the order of arrival."""
    FIXED = "fixed"
    """One degree for all, in the order of arrival."""


@dataclass(frozen=True)
class RuleSetting:
    """A rule with its switches."""

    name: RuleName = RuleName.REPLANNING
    degrees: tuple[int, ...] = DEGREES
    """That it may use; a fixed one uses the first."""
    parts: ReplanningOptions = field(default_factory=ReplanningOptions)
    """Switches of our rule."""
    round_steps: int = 5
    """Steps in a round, of the largest row on most devices."""
    ties: TieBreak = TieBreak.EAGER
    """Of rounds."""

    def make(self, devices: int, formula: StepFormula = TETRISERVE) -> PoolRule:
        """The rule for one run."""
        match self.name:
            case RuleName.REPLANNING:
                parts = replace(self.parts, degrees=self.degrees)
                return ReplanningRule(devices, parts, together=partial(step_times.together, formula))
            case RuleName.EVENTS:
                return EventDrivenRule()
            case RuleName.ROUNDS:
                largest = PoolRowSize(LARGEST, tokens_of(LARGEST))
                longest = step_times.times(formula, largest, self._able(devices))
                return RoundBasedRule.of_steps(self.round_steps, longest[max(longest)], devices, self.ties)
            case RuleName.FIXED:
                return FixedDegrees(self.degrees[0])
            case _:
                return FixedDegrees(_best_degrees(self._able(devices)))

    def groups(self, devices: int) -> AbstractSet[Devices] | None:
        """Subsets of which the rule may choose; None for all."""
        if self.name is not RuleName.REPLANNING:
            return None
        return frozenset(device_subsets(devices))

    def _able(self, devices: int) -> tuple[int, ...]:
        return tuple(degree for degree in self.degrees if degree <= devices)


RSSP: Final = RuleSetting(RuleName.RESOLUTION, POWERS)
AS_WRITTEN: Final = RuleSetting(RuleName.ROUNDS, POWERS, round_steps=2, ties=TieBreak.FEWEST)
"""Algorithm 1 with five steps a round. Of which picture the paper does not say: five of 1024² on four devices take as
long as two of 2048² on eight, and rounds of that length agree with its table 5. Ties go to fewest devices."""


@dataclass(frozen=True)
class PoolRuleCase:
    """A workload, the rule that serves it, and the pool."""

    workload: PoolWorkload
    rule: RuleSetting
    devices: int = 8
    formula: StepFormula = TETRISERVE


def run_case(case: PoolRuleCase) -> PoolRun:
    """Serve a workload."""
    world = PoolWorld(
        case.workload.draw(),
        case.rule.make(case.devices, case.formula),
        case.rule.degrees,
        devices=case.devices,
        subsets=case.rule.groups(case.devices),
        formula=case.formula,
    )
    outcomes = world.run()
    summary = summarise(outcomes, case.devices, world.decisions)
    return PoolRun(summary, tuple(outcomes))


@dataclass(frozen=True)
class BoundCase:
    """A workload, and the degrees that any rule may use for it on so many devices."""

    workload: PoolWorkload
    degrees: tuple[int, ...] = DEGREES
    devices: int = 8
    formula: StepFormula = TETRISERVE


def bound_of(case: BoundCase) -> float:
    """The greatest attainment that any rule has; moves cost nothing, and masked rows no step in full."""
    able = tuple(degree for degree in case.degrees if degree <= case.devices)
    requests = case.workload.draw()
    times = partial(step_times.times, case.formula)
    tasks = [FluidTask(r.at_s, r.due_s, r.steps, times(r.size, able)) for r in requests]
    return most_in_time(tasks, case.devices, limit_s=BOUND_LIMIT_S) / len(requests)


def _best_degrees(degrees: Sequence[int]) -> dict[Hashable, int]:
    """By size: the degree that is best for its resolution, or the widest that there is below."""
    return {
        PoolRowSize(side, computed): max(degree for degree in degrees if degree <= max(best, min(degrees)))
        for side, best in BEST_DEGREES.items()
        for computed in range(SHAPE_TOKENS, tokens_of(side) + 1, SHAPE_TOKENS)
    }
