"""One run of a simulated pool: a rule decides on a virtual clock, and every decision is checked."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from giornata.scheduling.degrees.pool import Devices, PoolRow, PoolRule, StepStart, Times
from giornata_lab.simulation.degrees import workloads
from giornata_lab.simulation.degrees.workloads import PoolRequest

EPSILON_S: Final = 1e-9
"""By which an end may miss its deadline: rounding."""
SAME_S: Final = 1e-12
"""Events so close are at one moment, and the rule is asked once."""


MOST_IDLE: Final = 1000
"""Decisions, after the last arrival, for which a rule may let a pool with rows idle."""


class WrongDecision(ValueError):
    """A rule began what cannot begin: its text tells what it was, and why."""


@dataclass(frozen=True, slots=True)
class PoolRowOutcome:
    """How a row ended."""

    request: PoolRequest
    end_s: float
    device_s: float
    """Seconds that its steps held devices, summed over these; shared steps count their part."""
    moves: int
    """Steps on other devices than the one before."""
    degrees: Counter[int] = field(compare=False)
    """Steps by degree."""

    @property
    def met(self) -> bool:
        """Return whether it ended in time."""
        return self.end_s <= self.request.due_s + EPSILON_S

    @property
    def latency_s(self) -> float:
        """From arrival to the last step's end."""
        return self.end_s - self.request.at_s


@dataclass(slots=True)
class _Row:
    request: PoolRequest
    left: int
    step_s: Times
    moved_s: Times
    devices: Devices = ()
    until_s: float | None = None
    device_s: float = 0.0
    moves: int = 0
    counted: Counter[int] = field(default_factory=Counter)

    def seen(self) -> PoolRow:
        request = self.request
        return PoolRow(
            key=request.number,
            arrived_s=request.at_s,
            due_s=request.due_s,
            left=self.left,
            step_s=self.step_s,
            moved_s=self.moved_s,
            devices=self.devices,
            until_s=self.until_s,
            place=float(request.number),
            size=request.size,
        )


class PoolWorld:
    """A pool of equal devices that serves the requests of a run."""

    def __init__(
        self,
        requests: Sequence[PoolRequest],
        rule: PoolRule,
        degrees: Sequence[int],
        *,
        devices: int = 8,
        subsets: AbstractSet[Devices] | None = None,
        formula: workloads.StepFormula = workloads.TETRISERVE,
    ) -> None:
        """Prepare a run.

        Args:
            requests: in any order, their numbers distinct.
            rule: asked at every arrival, every end of a step and when it asked to be.
            degrees: that the profile knows; those above `devices` are left out.
            devices: of the pool.
            subsets: those that may compute a step together; default all.
            formula: of what steps take.
        """
        self._formula = formula
        self._rule, self._subsets = rule, subsets
        self._degrees = tuple(degree for degree in degrees if degree <= devices)
        self._free = set(range(devices))
        self._rows: dict[Hashable, _Row] = {}
        self._arriving = sorted(requests, key=lambda request: (request.at_s, request.number), reverse=True)
        self._ends: list[tuple[float, int, StepStart]] = []
        self._wake_s: float | None = None
        self._begun = self._idle = 0
        self._ended: list[PoolRowOutcome] = []
        self.decisions = 0
        """That the rule has made."""

    def run(self) -> list[PoolRowOutcome]:
        """Serve all requests.

        Returns:
            How each ended, in the order of their numbers.

        Raises:
            WrongDecision: the rule began what cannot begin, or left the pool idle for good.
        """
        while (now := self._next()) is not None:
            self._wake_s = None if self._wake_s is not None and self._wake_s <= now + SAME_S else self._wake_s
            while self._ends and self._ends[0][0] <= now + SAME_S:
                self._end(now, heapq.heappop(self._ends)[2])
            while self._arriving and self._arriving[-1].at_s <= now + SAME_S:
                request = self._arriving.pop()
                step_s = workloads.times(self._formula, request.size, self._degrees)
                moved_s = workloads.moved_times(self._formula, request.size, self._degrees)
                self._rows[request.number] = _Row(request, request.steps, step_s, moved_s)
            if self._rows:
                self._decide(now)
        return sorted(self._ended, key=lambda outcome: outcome.request.number)

    def _next(self) -> float | None:
        times = [self._ends[0][0]] if self._ends else []
        times += [self._arriving[-1].at_s] if self._arriving else []
        if self._wake_s is not None and self._rows:
            times.append(self._wake_s)
        if not times and self._rows:
            raise WrongDecision(f"{len(self._rows)} rows wait, no step is in flight and none began")
        return min(times, default=None)

    def _decide(self, now: float) -> None:
        rows = [row.seen() for row in self._rows.values()]
        decision = self._rule.decide(now, rows, frozenset(self._free))
        self.decisions += 1
        for begin in decision.begins:
            self._begin(now, begin)
        self._idle = 0 if self._ends or self._arriving else self._idle + 1
        if self._idle > MOST_IDLE:
            raise WrongDecision(f"{len(rows)} rows wait, and none begins in {MOST_IDLE} decisions")
        if decision.wake_s is not None:
            if decision.wake_s <= now + SAME_S:
                raise WrongDecision(f"asked to be woken at {decision.wake_s:g} s; it is {now:g} s")
            self._wake_s = decision.wake_s

    def _begin(self, now: float, begin: StepStart) -> None:
        rows = self._checked(begin)
        degree = len(begin.devices)
        full = [row.devices != begin.devices for row in rows]
        step_s, first_s = self._seconds(rows, degree, full)
        seconds = begin.steps * step_s + (first_s - step_s)
        for row, moved in zip(rows, full, strict=True):
            row.moves += moved and row.devices != ()
            row.left -= begin.steps
            row.devices, row.until_s = begin.devices, now + seconds
            row.device_s += degree * seconds / len(rows)
            row.counted[degree] += begin.steps
        self._free -= set(begin.devices)
        self._begun += 1
        heapq.heappush(self._ends, (now + seconds, self._begun, begin))

    def _checked(self, begin: StepStart) -> list[_Row]:
        """The rows of a step that may begin."""
        devices = begin.devices
        if not devices or list(devices) != sorted(set(devices)):
            raise WrongDecision(f"received devices {devices}; accepted are some, ascending, each once")
        if not self._free.issuperset(devices):
            raise WrongDecision(f"received devices {devices}; free are {sorted(self._free)}")
        if self._subsets is not None and devices not in self._subsets:
            raise WrongDecision(f"received devices {devices}, which are no group of the pool")
        if len(devices) not in self._degrees:
            raise WrongDecision(f"received degree {len(devices)}; the profile knows {self._degrees}")
        if not begin.rows or len(set(begin.rows)) < len(begin.rows):
            raise WrongDecision(f"received rows {begin.rows}; accepted are some, each once")
        if unknown := [key for key in begin.rows if key not in self._rows]:
            raise WrongDecision(f"received row {unknown[0]}, which the pool does not have")
        rows = [self._rows[key] for key in begin.rows]
        if running := [row for row in rows if row.until_s is not None]:
            raise WrongDecision(f"received row {running[0].request.number}, which is in a step")
        if not 1 <= begin.steps <= min(row.left for row in rows):
            raise WrongDecision(
                f"received {begin.steps} steps; accepted are 1 to {min(row.left for row in rows)}"
            )
        if len(rows) > workloads.MOST_ROWS:
            raise WrongDecision(f"received {len(rows)} rows in a step; accepted are {workloads.MOST_ROWS}")
        return rows

    def _end(self, now: float, begin: StepStart) -> None:
        self._free |= set(begin.devices)
        for key in begin.rows:
            row = self._rows[key]
            row.until_s = None
            if not row.left:
                del self._rows[key]
                self._ended.append(PoolRowOutcome(row.request, now, row.device_s, row.moves, row.counted))

    def _seconds(self, rows: Sequence[_Row], degree: int, full: Sequence[bool]) -> tuple[float, float]:
        """Times of a step of `rows` on the devices of the one before, and of their first, with some in full."""
        if len(rows) == 1:
            row = rows[0]
            return row.step_s[degree], (row.moved_s if full[0] else row.step_s)[degree]
        sizes = [row.request.size for row in rows]
        own = workloads.shared_s(self._formula, [(size, False) for size in sizes], degree)
        return own, workloads.shared_s(self._formula, list(zip(sizes, full, strict=True)), degree)
