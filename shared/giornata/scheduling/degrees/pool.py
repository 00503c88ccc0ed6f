"""A pool's rows and devices as a rule sees them, and what a rule decides: the interface of all rules. Pure.

A *degree* is how many devices compute a step of a row together. Times are in seconds, by the clock of `now_s`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol

from giornata.wire.jobs import Priority

DEGREES: Final = (1, 2, 3, 4, 6, 8)
"""Devices that may compute a step together, as far as a pool has them and the profile knows their times."""

Devices = tuple[int, ...]
"""Devices of a pool that compute a step together, ascending; see :mod:`giornata.scheduling.degrees.subsets`."""
Times = Mapping[int, float]
"""Seconds of one step by degree. A degree that is absent is not used. Two devices may have two ways to compute a step:
they share its tokens, or one computes the unconditional sequences (Katz, section 7). The quicker one counts."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row of a pool at its latest step boundary, or in a step."""

    key: Hashable
    arrived_s: float
    due_s: float
    """When its last step has to end; infinite without a deadline."""
    left: int
    """Steps that are not computed, that in flight not counted."""
    step_s: Times
    """Seconds, by degree, of a step on the devices of the one before."""
    moved_s: Times
    """Seconds, by degree, of its first step here, and of each step on other devices than the one before. A
    row that takes corrected values from a template, or its own from an earlier step, computes such a step in
    full; for other rows this is `step_s`."""
    devices: Devices = ()
    """Devices of its step in flight, else of its last one; empty before the first one here."""
    until_s: float | None = None
    """When its step in flight ends; None at a step boundary."""
    priority: Priority = Priority.INTERACTIVE
    place: float = 0.0
    """In the order of rows without a deadline: lower ones come first."""
    background: bool = False
    """A template run: it has no deadline, one device, and comes last."""
    size: Hashable = None
    """What tells how long it takes with others in one step; see :data:`SharedStepTime`."""

    @property
    def boundary(self) -> bool:
        """Whether it could begin a step now."""
        return self.until_s is None and self.left > 0

    @property
    def fastest_s(self) -> float:
        """The shortest of its steps."""
        return min(self.step_s.values())

    @property
    def promised(self) -> bool:
        """Whether somebody waits for it by a certain time."""
        return math.isfinite(self.due_s)


@dataclass(frozen=True, slots=True)
class StepStart:
    """A step that begins now."""

    rows: tuple[Hashable, ...]
    """Keys of the rows that share it; all are at a step boundary."""
    devices: Devices
    steps: int = 1
    """So many steps follow without another decision: 1 but for baselines in the simulator."""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """What a rule says."""

    begins: tuple[StepStart, ...] = ()
    """Their devices are free and overlap nowhere."""
    wake_s: float | None = None
    """When the rule is to be asked again though nothing arrives or ends; None for not before."""


class SharedStepTime(Protocol):
    """Tells how long rows take that share a step."""

    def __call__(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        """Seconds of a step of `rows`, two at the least, none of them moved; None where they may not share one."""


class PoolRule(Protocol):
    """Chooses the steps that begin now."""

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """Choose among `rows`, all that the pool has, in any order; `free` are the devices that no step holds.

        Those that steps of `rows` hold are the others; a device that is lost is neither.
        Asked at every arrival, at every end of a step and when it asked to be. Where a device is free and rows are at
        a boundary, it never leaves all devices of the pool idle.
        """
