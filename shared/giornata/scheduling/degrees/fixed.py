"""Rules that never change a row's degree: baselines, in the simulator and live. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from giornata.scheduling.degrees.pool import (
    DEGREES,
    DeviceRequest,
    DeviceSubsets,
    PoolDecision,
    PoolRow,
    StepStart,
    device_subsets,
)


class FixedDegrees:
    """A :class:`~giornata.scheduling.degrees.pool.PoolRule` that computes each row on constant devices until its end.

    Rows begin in the order of their arrival; the first that finds no devices holds up all behind it. A row without a
    time for its degree has the next narrower one, else its narrowest.

    Args:
        devices: that the pool has when none is lost.
        degree: of all rows, as xDiT serves; or by their size, the best of each, which TetriServe (section 6.1) calls
            RSSP. A row of another size has degree 1.
        by_deadline: rows begin in the order of their deadlines instead.

    Raises:
        ValueError: the pool has no such degree.
    """

    def __init__(
        self, devices: int, degree: int | Mapping[Hashable, int], *, by_deadline: bool = False
    ) -> None:
        self._degree, self._by_deadline = degree, by_deadline
        self._subsets = DeviceSubsets([group for group in device_subsets(devices) if len(group) in DEGREES])
        has = self._subsets.degrees(range(devices))
        for wanted in (degree,) if isinstance(degree, int) else degree.values():
            if wanted not in has:
                raise ValueError(f"{devices} devices have the degrees {sorted(has)}; received {wanted}")

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`~giornata.scheduling.degrees.pool.PoolRule`."""
        del now_s
        there = frozenset(free).union(*(row.devices for row in rows if row.until_s is not None))
        has, left = self._subsets.degrees(there), set(free)
        begins = []
        for row in sorted((row for row in rows if row.boundary), key=self._turn):
            able = row.step_s.keys() & has
            if not able:
                continue
            degree = self._degree_of(row, able)
            placed = self._subsets.place([DeviceRequest(row.key, degree, {degree}, row.devices)], left)
            if not placed:
                break
            begins.append(StepStart((row.key,), placed[row.key]))
            left -= set(placed[row.key])
        return PoolDecision(tuple(begins))

    def _degree_of(self, row: PoolRow, able: AbstractSet[int]) -> int:
        wanted = self._degree if isinstance(self._degree, int) else self._degree.get(row.size, 1)
        return max(
            (degree for degree in able if degree <= (1 if row.background else wanted)), default=min(able)
        )

    def _turn(self, row: PoolRow) -> tuple[bool, bool, float, float]:
        """Begun rows come first: their devices are free, since no other row gets them."""
        return not row.devices, row.background, row.due_s if self._by_deadline else row.arrived_s, row.place
