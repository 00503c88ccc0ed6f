"""Charts as values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Points = Sequence[tuple[float, float]]


class PointStyle(Enum):
    """How points are drawn: the line that joins them, and the marker on each."""

    LINE = ("-", "")
    BOTH = ("-", "o")


@dataclass(frozen=True)
class Chart:
    """Lines over a horizontal axis. Both axes begin at 0, except a logarithmic vertical one."""

    title: str
    across: str
    """What the horizontal axis is, with its unit."""
    up: str
    """What the vertical axis is, with its unit."""
    lines: Mapping[str, Points]
    """Points by the line's name, none below 0; all above 0 where the vertical axis is logarithmic."""
    drawn: PointStyle = PointStyle.BOTH
    logarithmic: bool = False


def distribution(values: Iterable[float]) -> Points:
    """Each value, in order, and the share of all that are no larger."""
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def thinned(points: Points) -> Points:
    """Every n-th point and the last one, so that a line shows about 400."""
    every = max(1, len(points) // 400)
    return [*points[::every], *points[-1:]]
