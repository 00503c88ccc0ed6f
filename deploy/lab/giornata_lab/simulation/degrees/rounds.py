"""TetriServe's Algorithm 1 in rounds of a fixed length, with what the paper leaves open as switches (baseline)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow, Times
from giornata_lab.simulation.degrees.algorithm1 import (
    EAGER,
    EPSILON_S,
    DegreeOption,
    by_due,
    hopeless,
    knapsack,
    least_device_time,
    placed,
)

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


@dataclass(frozen=True)
class RoundSwitches:
    """What the paper names as parts (section 4.4), or does not say."""

    ties: TieBreak = TieBreak.EAGER
    placement: bool = True
    """A row of as many devices as before keeps them."""
    scale_up: bool = True
    """Idle devices widen rows that have some."""
    fill: bool = True
    """Idle devices go first to rows in time that were not chosen, by deadline."""
    idle_start: bool = True
    """A round begins at an arrival where no row has begun."""
    whole_steps: bool = True
    """An allocation reckons with the time that whole steps leave unused in a round."""


class RoundBasedRule:
    """Decides for all rows at once, and then not before the round is over."""

    def __init__(self, round_s: float, devices: int = 8, switches: RoundSwitches | None = None) -> None:
        """Make one for a pool; it knows when its round ends, and so serves one run.

        Args:
            round_s: length; a row whose step is longer gets none.
            devices: of the pool.
            switches: default as :class:`RoundSwitches` has them.
        """
        self._round_s, self._devices = round_s, devices
        self._switches = switches or RoundSwitches()
        self._next_s = 0.0

    @classmethod
    def of_steps(
        cls, steps: int, longest_s: float, devices: int = 8, switches: RoundSwitches | None = None
    ) -> RoundBasedRule:
        """Rounds as long as so many steps of the largest row on all devices."""
        return cls(steps * longest_s * ROOM, devices, switches)

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
        if self._switches.fill:
            self._fill(by_due(row for row in timely if row.key not in degrees), degrees, len(free))
        late = sorted((row for row in ready if hopeless(row, now_s)), key=lambda row: row.arrived_s)
        self._serve_late(late, degrees, len(free))
        if self._switches.scale_up:
            self._scale_up(ready, degrees, now_s, len(free))
        steps = {row.key: self._steps(row, degrees[row.key]) for row in ready if row.key in degrees}
        begins = placed(ready, degrees, free, steps, keeps=self._switches.placement)
        return PoolDecision(begins, wake_s=self._next_s)

    def _starts_idle(self, rows: Sequence[PoolRow], free: AbstractSet[int]) -> bool:
        fresh = all(row.boundary and not row.devices for row in rows)
        return self._switches.idle_start and len(free) == self._devices and fresh

    def _steps(self, row: PoolRow, degree: int) -> int:
        """That a row computes in a round."""
        return min(row.left, int(self._round_s / row.step_s[degree] + EPSILON_S))

    def _options(self, row: PoolRow, now_s: float) -> list[DegreeOption]:
        """Options of a row that is in time: nothing, or a degree of its allocation of least device-time."""
        ends_s = now_s + self._round_s
        survives = ends_s + row.left * row.fastest_s <= row.due_s + EPSILON_S
        options = [DegreeOption(0, float(survives))]
        times = (
            {k: self._reckoned(t) for k, t in row.step_s.items()}
            if self._switches.whole_steps
            else row.step_s
        )
        shares = least_device_time(times, row.left, row.due_s - now_s)
        for degree in [share.degree for share in shares] or [fastest(row.step_s)]:
            steps = self._steps(row, degree)
            if not steps:
                continue
            left = row.left - steps
            survives = ends_s + left * row.fastest_s <= row.due_s + EPSILON_S
            done = not left and now_s + steps * row.step_s[degree] <= row.due_s + EPSILON_S
            worth = float(survives or done)
            if self._switches.ties is TieBreak.EAGER:
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
