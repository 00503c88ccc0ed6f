"""Lines over a horizontal axis as one self-contained SVG. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 50
COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#555555")
"""Paul Tol's bright scheme: told apart by the colour-blind too."""


def svg(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """A chart of `lines`; the vertical axis is logarithmic.

    Args:
        title: above it.
        across: what the horizontal axis is, with its unit.
        up: likewise the vertical one.
        lines: points by name, all of positive height.

    Raises:
        ValueError: there are no points.
    """
    every = [point for points in lines.values() for point in points]
    if not every:
        raise ValueError("a chart needs one point or more")
    right = max(x for x, _ in every) or 1.0
    low = floor(log10(min(y for _, y in every)))
    high = max(low + 1, ceil(log10(max(y for _, y in every))))
    plot = _Plot(right, low, high)
    body = [*_axes(plot, across, up)]
    for number, (name, points) in enumerate(lines.items()):
        body += _line(plot, name, points, number)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


class _Plot:
    """Where values lie on the page."""

    def __init__(self, right: float, low: int, high: int) -> None:
        self.right, self.low, self.high = right, low, high

    def x(self, value: float) -> float:
        return round(LEFT + value / self.right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (log10(value) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _axes(plot: _Plot, across: str, up: str) -> list[str]:
    parts = []
    for decade in range(plot.low, plot.high + 1):
        y = plot.y(10**decade)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{10**decade:g}</text>')
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


def _line(plot: _Plot, name: str, points: Points, number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    places = [(plot.x(x), plot.y(y)) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in places)
    below = TOP + 16 * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places),
        f'<rect x="{WIDTH - RIGHT + 16}" y="{below}" width="12" height="3" fill="{colour}"/>',
        f'<text x="{WIDTH - RIGHT + 34}" y="{below + 6}">{escape(name)}</text>',
    ]
