"""All rules of a simulated pool, TetriServe's Algorithm 1 and fixed degrees among them, and runs of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

from giornata.scheduling.degrees.plans import degree_frontier
from giornata.scheduling.degrees.pool import (
    DEGREES,
    Devices,
    PoolDecision,
    PoolRow,
    PoolRule,
    StepStart,
    Times,
    device_subsets,
)
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.simulation.degrees import workloads
from giornata_lab.simulation.degrees.bound import FluidTask, most_in_time
from giornata_lab.simulation.degrees.workloads import (
    LARGEST,
    SHAPE_TOKENS,
    TETRISERVE,
    PoolRowSize,
    PoolWorkload,
    StepFormula,
    tokens_of,
)
from giornata_lab.simulation.degrees.world import PoolRowOutcome, PoolWorld

# What TetriServe's Algorithm 1 is made of, in rounds and at events: allocations of least device-time, and a
# knapsack.
#
# A row's allocation is a mixture of two degrees that ends in time with the least device-time. The knapsack
# gives each row one of its options, so that most rows can still end in time (TetriServe, sections 4.2 and
# 4.3).


EPSILON_S: Final = 1e-9
SAME: Final = 1e-12
"""Worths so close are equal."""
EAGER: Final = 1e-3
"""What a step of all that are left is worth beside a kept deadline, where ties go to progress."""


class DegreeSteps(NamedTuple):
    """Steps that an allocation computes at one degree."""

    steps: int
    degree: int


class DegreeOption(NamedTuple):
    """What a row may get."""

    degree: int
    """0: nothing."""
    worth: float


def least_device_time(times: Times, left: int, within_s: float) -> list[DegreeSteps]:
    """Steps by degree that end within so many seconds with the least device-time; empty where nothing does."""
    degrees = [rung.degree for rung in degree_frontier(times, max(times)).rungs]
    if left * times[degrees[-1]] > within_s + EPSILON_S:
        return []
    if left * times[degrees[0]] <= within_s + EPSILON_S:
        return [DegreeSteps(left, degrees[0])]
    slow, fast = next(pair for pair in pairwise(degrees) if left * times[pair[1]] <= within_s + EPSILON_S)
    late_s = left * times[slow] - within_s
    quick = math.ceil(late_s / (times[slow] - times[fast]) - EPSILON_S)
    return [share for share in (DegreeSteps(left - quick, slow), DegreeSteps(quick, fast)) if share.steps > 0]


def knapsack(rows: Sequence[Sequence[DegreeOption]], free: int) -> list[int]:
    """One option's degree for each of `rows`, at most `free` devices together, of the greatest worth.

    Of equal ones the choice takes the fewest devices. Every row has an option of degree 0.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for options in rows:
        more: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (worth, chosen) in best.items():
            for option in options:
                taken = used + option.degree
                if taken > free:
                    continue
                if taken not in more or more[taken][0] < worth + option.worth - SAME:
                    more[taken] = worth + option.worth, (*chosen, option.degree)
        best = more
    used = min(best, key=lambda taken: (-best[taken][0], taken))
    return list(best[used][1])


def hopeless(row: PoolRow, now_s: float) -> bool:
    """Return whether a row cannot end in time, whatever it gets."""
    begins_s = now_s if row.until_s is None else row.until_s
    return begins_s + row.left * row.fastest_s > row.due_s + EPSILON_S


def placed(
    rows: Sequence[PoolRow],
    degrees: Mapping[Hashable, int],
    free: AbstractSet[int],
    steps: Mapping[Hashable, int] | None = None,
) -> tuple[StepStart, ...]:
    """Steps on devices: any that are free may compute together, as TetriServe has it.

    A row of as many devices as before keeps them where they are free (placement preservation, section 4.4).

    Args:
        rows: all that are known.
        degrees: by the keys of rows that begin, together no more than `free`.
        free: devices.
        steps: by key, without another decision; default one.
    """
    found: dict[Hashable, Devices] = {}
    rest = set(free)
    chosen = [row for row in rows if row.key in degrees]
    for row in chosen:
        if len(row.devices) == degrees[row.key] and rest.issuperset(row.devices):
            found[row.key] = row.devices
            rest -= set(row.devices)
    moving = (row for row in chosen if row.key not in found)
    for row in sorted(moving, key=lambda row: (-degrees[row.key], row.arrived_s)):
        found[row.key] = tuple(sorted(rest)[: degrees[row.key]])
        rest -= set(found[row.key])
    return tuple(StepStart((row.key,), found[row.key], steps[row.key] if steps else 1) for row in chosen)


def by_due(rows: Iterable[PoolRow]) -> list[PoolRow]:
    """Earliest deadline first."""
    return sorted(rows, key=lambda row: row.due_s)


# TetriServe's Algorithm 1 in rounds of a fixed length, with what the paper leaves open as switches
# (baseline).


Degrees = dict[Hashable, int]
"""Degrees of rows that begin, by key."""
ROOM: Final = 1.0001
"""A round is longer than its steps by this factor, so that rounding does not keep one out."""


class TieBreak(StrEnum):
    """Which of the choices that keep equally many deadlines is taken."""

    EAGER = "eager"
    """The one that computes more."""
    FEWEST = "fewest"
    """The one of fewest devices."""


class RoundBasedRule:
    """Decides for all rows at once, and then not before the round is over.

    A round begins at an arrival where no row has begun. Idle devices go first to rows in time that were not chosen, by
    deadline, and then widen rows that have some (section 4.4). An allocation reckons with the time that whole steps
    leave unused in a round.
    """

    def __init__(self, round_s: float, devices: int = 8, ties: TieBreak = TieBreak.EAGER) -> None:
        """Make one for a pool; it knows when its round ends, and so serves one run.

        Args:
            round_s: length; a row whose step is longer gets none.
            devices: of the pool.
            ties: between choices that keep equally many deadlines, which the paper does not say.
        """
        self._round_s, self._devices = round_s, devices
        self._ties = ties
        self._next_s = 0.0

    @classmethod
    def of_steps(
        cls, steps: int, longest_s: float, devices: int = 8, ties: TieBreak = TieBreak.EAGER
    ) -> RoundBasedRule:
        """Rounds as long as so many steps of the largest row on all devices."""
        return cls(steps * longest_s * ROOM, devices, ties)

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """Begin a round, or wait for the end of the present one."""
        if now_s < self._next_s - EPSILON_S and not self._starts_idle(rows, free):
            return PoolDecision(wake_s=self._next_s)
        self._next_s = now_s + self._round_s
        ready = [row for row in rows if row.boundary]
        timely = [row for row in ready if not hopeless(row, now_s)]
        options = [self._options(row, now_s) for row in timely]
        chosen = zip(timely, knapsack(options, len(free)), strict=True)
        degrees: Degrees = {row.key: degree for row, degree in chosen if degree}
        self._fill(by_due(row for row in timely if row.key not in degrees), degrees, len(free))
        late = sorted((row for row in ready if hopeless(row, now_s)), key=lambda row: row.arrived_s)
        self._serve_late(late, degrees, len(free))
        self._scale_up(ready, degrees, now_s, len(free))
        steps = {row.key: self._steps(row, degrees[row.key]) for row in ready if row.key in degrees}
        begins = placed(ready, degrees, free, steps)
        return PoolDecision(begins, wake_s=self._next_s)

    def _starts_idle(self, rows: Sequence[PoolRow], free: AbstractSet[int]) -> bool:
        fresh = all(row.boundary and not row.devices for row in rows)
        return len(free) == self._devices and fresh

    def _steps(self, row: PoolRow, degree: int) -> int:
        """That a row computes in a round."""
        return min(row.left, int(self._round_s / row.step_s[degree] + EPSILON_S))

    def _options(self, row: PoolRow, now_s: float) -> list[DegreeOption]:
        """Options of a row that is in time: nothing, or a degree of its allocation of least device-time."""
        ends_s = now_s + self._round_s
        survives = ends_s + row.left * row.fastest_s <= row.due_s + EPSILON_S
        options = [DegreeOption(0, float(survives))]
        times = {k: self._reckoned(t) for k, t in row.step_s.items()}
        shares = least_device_time(times, row.left, row.due_s - now_s)
        for degree in [share.degree for share in shares] or [fastest(row.step_s)]:
            steps = self._steps(row, degree)
            if not steps:
                continue
            left = row.left - steps
            survives = ends_s + left * row.fastest_s <= row.due_s + EPSILON_S
            done = not left and now_s + steps * row.step_s[degree] <= row.due_s + EPSILON_S
            worth = float(survives or done)
            if self._ties is TieBreak.EAGER:
                worth += EAGER * steps / row.left
            options.append(DegreeOption(degree, worth))
        return options

    def _reckoned(self, step_s: float) -> float:
        """A step's time with its part of what whole steps leave of a round."""
        steps = int(self._round_s / step_s + EPSILON_S)
        return self._round_s / steps if steps else step_s

    def _fill(self, rows: Sequence[PoolRow], degrees: Degrees, free: int) -> None:
        """The narrowest degree that computes a step, for rows that the knapsack left out."""
        for row in rows:
            able = [
                k for k in sorted(row.step_s) if k + sum(degrees.values()) <= free and self._steps(row, k)
            ]
            if able:
                degrees[row.key] = able[0]

    def _serve_late(self, rows: Sequence[PoolRow], degrees: Degrees, free: int) -> None:
        """The narrowest degree that computes a step, for each row that cannot be in time, as long as it is free."""
        for row in rows:
            narrow = [k for k in sorted(row.step_s) if self._steps(row, k)][:1]
            if narrow and narrow[0] + sum(degrees.values()) <= free:
                degrees[row.key] = narrow[0]

    def _scale_up(self, rows: Sequence[PoolRow], degrees: Degrees, now_s: float, free: int) -> None:
        """Give idle devices to rows that compute more with them, rows in time first, by gain for a device."""
        while True:
            idle = free - sum(degrees.values())
            found = []
            for row in rows:
                degree = degrees.get(row.key)
                if degree is None:
                    continue
                more = [
                    wide
                    for wide in row.step_s
                    if degree < wide <= degree + idle and self._steps(row, wide) > self._steps(row, degree)
                ]
                if more:
                    wide = min(more)
                    gain = (self._steps(row, wide) - self._steps(row, degree)) / row.left / (wide - degree)
                    found.append(((hopeless(row, now_s), -gain, row.place), row, wide))
            if not found:
                return
            _, row, wide = min(found, key=lambda one: one[0])
            degrees[row.key] = wide


def fastest(times: Times) -> int:
    """The degree of the shortest step."""
    return min(times, key=lambda degree: times[degree])


# Algorithm 1 at every event instead of in rounds: what deciding continuously alone brings (baseline).


LATE_STEP_S: Final = 0.25
"""A row that cannot be in time takes no longer steps where a degree allows."""


class EventDrivenRule:
    """Chooses one step for every row at a boundary, each time that it is asked."""

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`giornata.scheduling.degrees.pool.PoolRule`."""
        ready = [row for row in rows if row.boundary]
        if not free or not ready:
            return PoolDecision()
        timely = [row for row in ready if not hopeless(row, now_s)]
        chosen = knapsack([_options(row, now_s) for row in timely], len(free))
        degrees = {row.key: degree for row, degree in zip(timely, chosen, strict=True) if degree}
        widen(timely, degrees, len(free))
        running = [row for row in rows if not row.boundary]
        if not any(hopeless(row, now_s) for row in running):
            late = sorted((row for row in ready if hopeless(row, now_s)), key=least_work)
            _serve_one(late, degrees, len(free))
        if not degrees and not running:
            row = min(ready, key=least_work)
            degrees[row.key] = fastest({k: t for k, t in row.step_s.items() if k <= len(free)})
        return PoolDecision(placed(ready, degrees, free))


def least_work(row: PoolRow) -> float:
    """Device-seconds of what is left, at the cheapest degree."""
    return row.left * min(degree * step_s for degree, step_s in row.step_s.items())


def _options(row: PoolRow, now_s: float) -> list[DegreeOption]:
    """Nothing for as long as its fastest step, or a step of its allocation of least device-time."""
    options = [DegreeOption(0, float(now_s + (1 + row.left) * row.fastest_s <= row.due_s + EPSILON_S))]
    shares = least_device_time(row.step_s, row.left, row.due_s - now_s)
    for degree in [share.degree for share in shares] or [fastest(row.step_s)]:
        ends_s = now_s + row.step_s[degree] + (row.left - 1) * row.fastest_s
        options.append(DegreeOption(degree, float(ends_s <= row.due_s + EPSILON_S) + EAGER / row.left))
    return options


def widen(rows: Sequence[PoolRow], degrees: dict[Hashable, int], free: int) -> None:
    """Give idle devices to rows, the largest gain in speed for a device first; of equal ones the earliest deadline."""
    while True:
        idle = free - sum(degrees.values())
        best: tuple[tuple[float, float], PoolRow, int] | None = None
        for row in rows:
            degree = degrees.get(row.key, 0)
            rate = 1 / row.step_s[degree] if degree else 0.0
            cheapest = min(k * step_s for k, step_s in row.step_s.items())
            for wide, step_s in row.step_s.items():
                if degree < wide <= degree + idle and 1 / step_s > rate:
                    order = ((1 / step_s - rate) / (wide - degree) * cheapest, -row.due_s)
                    if best is None or order > best[0]:
                        best = order, row, wide
        if best is None:
            return
        degrees[best[1].key] = best[2]


def _serve_one(late: Sequence[PoolRow], degrees: dict[Hashable, int], free: int) -> None:
    """A short step for the first row that can have one."""
    idle = free - sum(degrees.values())
    for row in late:
        longest_s = max(LATE_STEP_S, row.fastest_s)
        able = {k: t for k, t in row.step_s.items() if k <= idle and t <= longest_s}
        if able:
            degrees[row.key] = fastest(able)
            return


class FixedDegrees:
    """A :class:`~giornata.scheduling.degrees.pool.PoolRule` that computes all steps of a row on constant devices.

    Rows begin in the order of their arrival; the first that finds no devices holds up all behind it.

    Args:
        degree: of all rows, as xDiT serves; or by their size, the best of each, which TetriServe (section 6.1) calls
            RSSP.
    """

    def __init__(self, degree: int | Mapping[Hashable, int]) -> None:
        self._degree = degree

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`giornata.scheduling.degrees.pool.PoolRule`."""
        del now_s
        begins, left = [], sorted(free)
        for row in sorted((row for row in rows if row.boundary), key=lambda row: (row.arrived_s, row.place)):
            degree = self._degree if isinstance(self._degree, int) else self._degree[row.size]
            if degree > len(left):
                break
            begins.append(StepStart((row.key,), tuple(left[:degree]), row.left))
            del left[:degree]
        return PoolDecision(tuple(begins))


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
                return ReplanningRule(devices, parts, together=partial(workloads.together, formula))
            case RuleName.EVENTS:
                return EventDrivenRule()
            case RuleName.ROUNDS:
                largest = PoolRowSize(LARGEST, tokens_of(LARGEST))
                longest = workloads.times(formula, largest, self._able(devices))
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


def bound_of(load: PoolWorkload, devices: int = 8, formula: StepFormula = TETRISERVE) -> float:
    """The greatest attainment that any rule has; moves cost nothing, and masked rows no step in full."""
    able = tuple(degree for degree in DEGREES if degree <= devices)
    requests = load.draw()
    tasks = [FluidTask(r.at_s, r.due_s, r.steps, workloads.times(formula, r.size, able)) for r in requests]
    return most_in_time(tasks, devices, limit_s=BOUND_LIMIT_S) / len(requests)


def _best_degrees(degrees: Sequence[int]) -> dict[Hashable, int]:
    """By size: the degree that is best for its resolution, or the widest that there is below."""
    return {
        PoolRowSize(side, computed): max(degree for degree in degrees if degree <= max(best, min(degrees)))
        for side, best in BEST_DEGREES.items()
        for computed in range(SHAPE_TOKENS, tokens_of(side) + 1, SHAPE_TOKENS)
    }
