"""All rules of a simulated pool, by name and with their switches, and runs of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations
from typing import Final

from giornata.scheduling.degrees.pool import DEGREES, Devices, PoolDecision, PoolRow, PoolRule, device_subsets
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from giornata_lab.simulation.degrees import step_times
from giornata_lab.simulation.degrees.baselines import (
    EventDrivenRule,
    FixedDegrees,
    RoundBasedRule,
    RoundSwitches,
)
from giornata_lab.simulation.degrees.bound import FluidTask, most_in_time
from giornata_lab.simulation.degrees.results import PoolRun, summarise
from giornata_lab.simulation.degrees.workloads import (
    LARGEST,
    SHAPE_TOKENS,
    PoolRowSize,
    PoolWorkload,
    tokens_of,
)
from giornata_lab.simulation.degrees.world import Listener, PoolWorld

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
    DEADLINE = "deadline"
    """The best degree by resolution, earliest deadline first."""
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
    without: str = ""
    """Which part of ours is off, for its label."""
    steps_between: int = 1
    """Steps that follow a decision of our rule without another one."""
    every_subset: bool = False
    """Whether our rule lets all devices compute together, even without a group of their own."""
    round_steps: int = 5
    """Steps in a round, of the largest row on most devices."""
    rounds: RoundSwitches = field(default_factory=RoundSwitches)

    @property
    def label(self) -> str:
        """Return what tables and charts call it."""
        more = f" without {self.without}" if self.without else ""
        more += f", {self.steps_between} steps a decision" if self.steps_between > 1 else ""
        more += ", all subsets" if self.every_subset else ""
        match self.name:
            case RuleName.FIXED:
                return f"degree {self.degrees[0]}"
            case RuleName.ROUNDS:
                return f"rounds of {self.round_steps}, {self.rounds.ties}"
            case RuleName.REPLANNING:
                return self.name + more
            case _:
                return str(self.name)

    def make(self, devices: int) -> PoolRule:
        """The rule for one run."""
        match self.name:
            case RuleName.REPLANNING:
                return self._replanning(devices)
            case RuleName.EVENTS:
                return EventDrivenRule()
            case RuleName.ROUNDS:
                longest = step_times.times(PoolRowSize(LARGEST, tokens_of(LARGEST)), self._able(devices))
                return RoundBasedRule.of_steps(self.round_steps, longest[max(longest)], devices, self.rounds)
            case RuleName.FIXED:
                return FixedDegrees(devices, self.degrees[0])
            case _:
                by_deadline = self.name is RuleName.DEADLINE
                return FixedDegrees(devices, _best_degrees(self._able(devices)), by_deadline=by_deadline)

    def groups(self, devices: int) -> AbstractSet[Devices] | None:
        """Subsets of which the rule may choose; None for all."""
        if self.name is not RuleName.REPLANNING or self.every_subset:
            return None
        return frozenset(device_subsets(devices))

    def _replanning(self, devices: int) -> PoolRule:
        parts = replace(self.parts, degrees=self.degrees)
        groups = every_subset(devices, self.degrees) if self.every_subset else None
        rule = ReplanningRule(devices, parts, together=step_times.together, groups=groups)
        return rule if self.steps_between == 1 else MultiStepRule(rule, self.steps_between)

    def _able(self, devices: int) -> tuple[int, ...]:
        return tuple(degree for degree in self.degrees if degree <= devices)


@dataclass(frozen=True)
class MultiStepRule:
    """A rule that decides less often: each step that it begins stands for several."""

    rule: PoolRule
    steps: int

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`giornata.scheduling.degrees.pool.PoolRule`."""
        left = {row.key: row.left for row in rows}
        decision = self.rule.decide(now_s, rows, free)
        begins = tuple(
            replace(begin, steps=min(self.steps, *(left[key] for key in begin.rows)))
            for begin in decision.begins
        )
        return replace(decision, begins=begins)


@dataclass(frozen=True)
class PoolRuleCase:
    """A workload, the rule that serves it, and the pool."""

    workload: PoolWorkload
    rule: RuleSetting
    devices: int = 8


def run_case(case: PoolRuleCase, listener: Listener | None = None) -> PoolRun:
    """Serve a workload; a listener is told of every decision."""
    world = PoolWorld(
        case.workload.draw(),
        case.rule.make(case.devices),
        case.rule.degrees,
        devices=case.devices,
        subsets=case.rule.groups(case.devices),
        listener=listener,
    )
    outcomes = world.run()
    summary = summarise(outcomes, case.devices, world.decisions)
    return PoolRun(case.rule.label, case.workload, summary, tuple(outcomes))


@dataclass(frozen=True)
class BoundCase:
    """A workload, and the degrees that any rule may use for it on so many devices."""

    workload: PoolWorkload
    degrees: tuple[int, ...] = DEGREES
    devices: int = 8


def bound_of(case: BoundCase) -> float:
    """The greatest attainment that any rule has; moves cost nothing, and masked rows no step in full."""
    able = tuple(degree for degree in case.degrees if degree <= case.devices)
    requests = case.workload.draw()
    tasks = [FluidTask(r.at_s, r.due_s, r.steps, step_times.times(r.size, able)) for r in requests]
    return most_in_time(tasks, case.devices, limit_s=BOUND_LIMIT_S) / len(requests)


def every_subset(devices: int, degrees: Sequence[int]) -> tuple[Devices, ...]:
    """All subsets of a pool of so many devices with one of the degrees."""
    return tuple(group for degree in degrees for group in combinations(range(devices), degree))


def _best_degrees(degrees: Sequence[int]) -> dict[Hashable, int]:
    """By size: the degree that is best for its resolution, or the widest that there is below."""
    return {
        PoolRowSize(side, computed): max(degree for degree in degrees if degree <= max(best, min(degrees)))
        for side, best in BEST_DEGREES.items()
        for computed in range(SHAPE_TOKENS, tokens_of(side) + 1, SHAPE_TOKENS)
    }
