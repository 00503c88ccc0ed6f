"""The degrees worth planning with: those that a mixture of least device-time takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from giornata.scheduling.degrees.pool import Times

EPS = 1e-9
_SHAPES = 4096
"""Frontiers that are remembered."""


@dataclass(frozen=True, slots=True)
class FrontierDegree:
    """A degree of a frontier."""

    degree: int
    rate: float
    """Steps a second."""
    more: float
    """By how much `rate` is above that of the rung before."""


@dataclass(frozen=True, slots=True)
class DegreeFrontier:
    """The efficient degrees of a row, cheapest first: each is faster than the one before and takes more device-time.

    Of all mixtures of degrees that make so many steps in so much time, one of two neighbours here takes the least
    device-time: they are the corners of the lower convex hull of (time, device-time) of a step.
    """

    rungs: tuple[FrontierDegree, ...]
    widest: tuple[tuple[int, ...], ...]
    """`widest[r][c]`: the degree of the widest of the first r rungs that `c` free devices allow, 0 for none."""
    fastest_s: float
    """Seconds of a step at the last rung."""
    work_s: float
    """Device-seconds of a step at the first rung: no degree takes fewer."""


def frontier(times: Times, devices: int) -> DegreeFrontier:
    """The frontier of `times` for a pool of so many devices; degrees that are wider than it are left out.

    Raises:
        ValueError: no degree is left.
    """
    return _frontier(tuple(times.items()), devices)


@lru_cache(maxsize=_SHAPES)
def _frontier(times: tuple[tuple[int, float], ...], devices: int) -> DegreeFrontier:
    corners = _corners(
        [(seconds, degree * seconds, degree) for degree, seconds in times if degree <= devices]
    )
    if not corners:
        raise ValueError(f"a step needs a time for a degree of 1 to {devices}; received {dict(times)}")
    rungs, rate = [], 0.0
    for seconds, _, degree in corners:
        rungs.append(FrontierDegree(degree, 1 / seconds, 1 / seconds - rate))
        rate = 1 / seconds
    degrees = [rung.degree for rung in rungs]
    widest = tuple(
        tuple(max((d for d in degrees[:first] if d <= free), default=0) for free in range(devices + 1))
        for first in range(len(rungs) + 1)
    )
    return DegreeFrontier(tuple(rungs), widest, corners[-1][0], corners[0][1])


def _corners(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """The lower convex hull of points (seconds, device-seconds, degree), slow and cheap ones first."""
    best: list[tuple[float, float, int]] = []
    for point in sorted(points, reverse=True):
        while best and best[-1][1] >= point[1]:
            best.pop()
        while len(best) > 1 and _above(best[-2], best[-1], point):
            best.pop()
        best.append(point)
    return best


def _above(
    left: tuple[float, float, int], middle: tuple[float, float, int], right: tuple[float, float, int]
) -> bool:
    """Whether `middle` is not below the line from `left` to `right`."""
    rise, run = middle[1] - left[1], left[0] - middle[0]
    return rise * (left[0] - right[0]) >= (right[1] - left[1]) * run
