"""A pool's rows and devices as a rule sees them: the interface of all rules. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from giornata.wire.jobs import Priority

# A *degree* is how many devices compute a step of a row together. Times are in seconds, by the clock of
# `now_s`.


DEGREES: Final = (1, 2, 3, 4, 6, 8)
"""Devices that may compute a step together, as far as a pool has them and the profile knows their times."""

Devices = tuple[int, ...]
"""Devices of a pool that compute a step together, ascending; see :mod:`giornata.scheduling.degrees.pool`."""
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
        """Return whether it could begin a step now."""
        return self.until_s is None and self.left > 0

    @property
    def fastest_s(self) -> float:
        """The shortest of its steps."""
        return min(self.step_s.values())

    @property
    def promised(self) -> bool:
        """Return whether somebody waits for it by a certain time."""
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
    """A decision of a degree rule."""

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


# Every group takes memory on each of its ranks, so only few subsets have one: on eight devices no rank is
# in more than six. With these, deadlines are kept as with all 85 subsets of the degrees 1, 2, 3, 4, 6 and
# 8.


_RANGES: Final[Mapping[int, str]] = {
    1: "",
    2: "0-1",
    3: "0-1 0-2",
    4: "0-1 2-3 0-2 0-3",
    5: "0-1 2-3 0-2 2-4 0-3",
    6: "0-1 2-3 4-5 0-2 3-5 0-3 2-5 0-5",
    7: "0-1 2-3 4-5 0-2 4-6 0-3 3-6 0-5",
    8: "0-1 2-3 4-5 6-7 0-2 4-6 0-3 4-7 0-5 2-7 0-7",
}
"""First and last device of each group, by the devices of a pool."""
MOST_DEVICES: Final = max(_RANGES)


def device_subsets(devices: int) -> tuple[Devices, ...]:
    """The subsets of a pool of so many devices that may compute a step together; each device alone is one.

    Raises:
        ValueError: no such pool is known.
    """
    if devices not in _RANGES:
        raise ValueError(f"a pool has 1 to {MOST_DEVICES} devices; received {devices}")
    bounds = [map(int, text.split("-")) for text in _RANGES[devices].split()]
    return (*((device,) for device in range(devices)), *(tuple(range(a, b + 1)) for a, b in bounds))


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A row that needs devices for a step."""

    key: Hashable
    degree: int
    degrees: AbstractSet[int]
    """That it may have instead."""
    own: Devices = ()
    """Devices of its step before; empty before the first one."""
    pays: bool = False
    """Whether a step on others takes it longer."""


class DeviceSubsets:
    """Places rows on the subsets of `groups`."""

    def __init__(self, groups: Sequence[Devices]) -> None:
        masks = [(_mask(group), group) for group in groups]
        self._of = {group: mask for mask, group in masks}
        self._by_degree: dict[int, list[tuple[int, Devices]]] = {}
        for mask, group in masks:
            self._by_degree.setdefault(len(group), []).append((mask, group))
        self._widest_first = sorted(((len(group), mask) for mask, group in masks), reverse=True)
        self._degrees: dict[int, frozenset[int]] = {}

    def degrees(self, devices: Iterable[int]) -> frozenset[int]:
        """Return those for which one of the groups lies in `devices`."""
        there = _mask(devices)
        if there not in self._degrees:
            self._degrees[there] = frozenset(
                degree for degree, mask in self._widest_first if mask & there == mask
            )
        return self._degrees[there]

    def place(
        self, seats: Iterable[DeviceRequest], free: Iterable[int], owned: Iterable[Devices] = ()
    ) -> dict[Hashable, Devices]:
        """Devices of each row that gets any, by its key; none overlap, all are free.

        Rows that pay for a move come first, then wide ones. Each keeps its own devices if it can. Else it gets the
        subset that has fewest of the `owned` ones, then the one that leaves the widest subset whole, then the one that
        has most of its own. A degree of which none is free is narrowed.

        Args:
            seats: the rows.
            free: devices that no step holds.
            owned: devices of rows that wait, and pay to leave them.
        """
        there, placed = _mask(free), {}
        others = [_mask(devices) for devices in owned]
        for seat in sorted(seats, key=lambda seat: (not self._keeps(seat, there), -seat.degree)):
            for degree in sorted((degree for degree in seat.degrees if degree <= seat.degree), reverse=True):
                able = [one for one in self._by_degree.get(degree, ()) if one[0] & there == one[0]]
                if able:
                    mask, placed[seat.key] = min(able, key=partial(self._harm, seat, there, others))
                    there &= ~mask
                    break
        return placed

    def _keeps(self, seat: DeviceRequest, there: int) -> bool:
        own = self._of.get(seat.own, 0)
        return seat.pays and len(seat.own) == seat.degree and own != 0 and own & there == own

    def _harm(
        self, seat: DeviceRequest, there: int, others: Sequence[int], one: tuple[int, Devices]
    ) -> tuple[bool, int, int, int]:
        mask, group = one
        rest = there & ~mask
        widest = next((degree for degree, other in self._widest_first if other & rest == other), 0)
        taken = sum(1 for other in others if other & mask)
        return group != seat.own, taken, -widest, -len(set(group).intersection(seat.own))


def _mask(devices: Iterable[int]) -> int:
    return sum(1 << device for device in devices)
