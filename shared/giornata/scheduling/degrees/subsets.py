"""Which devices of a pool have a process group, and which of these a row's step gets. Pure.

Every group takes memory on each of its ranks, so only few subsets have one: on eight devices no rank is in more than
six. With these, deadlines are kept as with all 85 subsets of the degrees 1, 2, 3, 4, 6 and 8.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Final

from giornata.scheduling.degrees.pool import Devices

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


def family(devices: int) -> tuple[Devices, ...]:
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
        """Those for which one of the groups lies in `devices`."""
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
