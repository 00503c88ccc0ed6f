"""What TetriServe's Algorithm 1 is made of, in rounds and at events: allocations of least device-time, and a knapsack.

A row's allocation is a mixture of two degrees that ends in time with the least device-time. The knapsack gives each row
one of its options, so that most rows can still end in time (TetriServe, sections 4.2 and 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Final, NamedTuple

from giornata.scheduling.degrees.frontier import frontier
from giornata.scheduling.degrees.pool import Devices, PoolRow, StepStart, Times

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
    degrees = [rung.degree for rung in frontier(times, max(times)).rungs]
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
    """Whether a row cannot end in time, whatever it gets."""
    begins_s = now_s if row.until_s is None else row.until_s
    return begins_s + row.left * row.fastest_s > row.due_s + EPSILON_S


def placed(
    rows: Sequence[PoolRow],
    degrees: Mapping[Hashable, int],
    free: AbstractSet[int],
    steps: Mapping[Hashable, int] | None = None,
    *,
    keeps: bool = True,
) -> tuple[StepStart, ...]:
    """Steps on devices: any that are free may compute together, as TetriServe has it.

    Args:
        rows: all that are known.
        degrees: by the keys of rows that begin, together no more than `free`.
        free: devices.
        steps: by key, without another decision; default one.
        keeps: whether a row of as many devices as before keeps them where they are free (placement preservation).
    """
    found: dict[Hashable, Devices] = {}
    rest = set(free)
    chosen = [row for row in rows if row.key in degrees]
    for row in chosen:
        if keeps and len(row.devices) == degrees[row.key] and rest.issuperset(row.devices):
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
