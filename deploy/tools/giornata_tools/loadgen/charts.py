"""Lines over a horizontal axis as one self-contained SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from math import ceil, floor, log10
from typing import Final

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 50
COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#555555")
"""Paul Tol's bright scheme: told apart by the colour-blind too."""


POINTS: Final = 400
"""About as many as a line shows."""


def distribution(values: Iterable[float]) -> Points:
    """Each value, in order, and the share of all that are no larger."""
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def thinned(points: Points) -> Points:
    """Every n-th, and the last one, so that there are about :data:`POINTS`."""
    every = max(1, len(points) // POINTS)
    return [*points[::every], *points[-1:]]


class Drawn(Enum):
    """How points are drawn: whether a line joins them, and the radius of their dots."""

    LINE = (True, 0)
    DOTS = (False, 2)
    BOTH = (True, 3)


def svg(
    title: str,
    across: str,
    up: str,
    lines: Mapping[str, Points],
    *,
    logarithmic: bool = True,
    drawn: Drawn = Drawn.BOTH,
) -> str:
    """A chart of `lines`; both axes begin at 0, but the vertical one where it is logarithmic.

    Args:
        title: above it.
        across: what the horizontal axis is, with its unit.
        up: likewise the vertical one.
        lines: points by name, none of them below 0, and all above where the vertical axis is logarithmic.
        logarithmic: the vertical axis.
        drawn: how points are.

    Raises:
        ValueError: there are no points.
    """
    every = [point for points in lines.values() for point in points]
    if not every:
        raise ValueError("a chart needs one point or more")
    right = max(x for x, _ in every) or 1.0
    heights = [y for _, y in every]
    plot = _decades(right, heights) if logarithmic else _quarters(right, heights)
    body = [*_axes(plot, across, up)]
    for number, (name, points) in enumerate(lines.items()):
        body += _line(plot, name, points, number, drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


class _Plot:
    """Where values lie on the page.

    Args:
        right: the largest value across; the least is 0.
        levels: of the vertical axis, from the lowest to the highest.
        logarithmic: the vertical axis.
    """

    def __init__(self, right: float, levels: Sequence[float], *, logarithmic: bool) -> None:
        self.right, self.levels = right, levels
        self._logarithmic = logarithmic
        self._low, self._high = self._scaled(levels[0]), self._scaled(levels[-1])

    def x(self, value: float) -> float:
        return round(LEFT + value / self.right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def _scaled(self, value: float) -> float:
        return log10(value) if self._logarithmic else value


def _decades(right: float, heights: Sequence[float]) -> _Plot:
    low = floor(log10(min(heights)))
    high = max(low + 1, ceil(log10(max(heights))))
    return _Plot(right, [10.0**decade for decade in range(low, high + 1)], logarithmic=True)


def _quarters(right: float, heights: Sequence[float]) -> _Plot:
    high = max(heights) or 1.0
    return _Plot(right, [high * part / 4 for part in range(5)], logarithmic=False)


def _axes(plot: _Plot, across: str, up: str) -> list[str]:
    parts = []
    for level in plot.levels:
        y = plot.y(level)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{level:.3g}</text>')
    for part in range(5):
        value = plot.right * part / 4
        parts.append(
            f'<text x="{plot.x(value)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:.3g}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) // 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'
    )
    return parts


def _line(plot: _Plot, name: str, points: Points, number: int, drawn: Drawn) -> list[str]:
    joined, radius = drawn.value
    colour = COLOURS[number % len(COLOURS)]
    places = [(plot.x(x), plot.y(y)) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in places)
    below = TOP + 16 * number
    line = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    dots = [f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>' for x, y in places]
    return [
        *(line if joined else []),
        *(dots if radius else []),
        f'<rect x="{WIDTH - RIGHT + 16}" y="{below}" width="12" height="3" fill="{colour}"/>',
        f'<text x="{WIDTH - RIGHT + 34}" y="{below + 6}">{escape(name)}</text>',
    ]
