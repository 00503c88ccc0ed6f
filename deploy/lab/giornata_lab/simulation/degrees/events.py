"""Algorithm 1 at every event instead of in rounds: what deciding continuously alone brings (baseline)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from giornata.scheduling.degrees.pool import PoolDecision, PoolRow
from giornata_lab.simulation.degrees.algorithm1 import (
    EAGER,
    EPSILON_S,
    DegreeOption,
    hopeless,
    knapsack,
    least_device_time,
    placed,
)
from giornata_lab.simulation.degrees.rounds import fastest

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
