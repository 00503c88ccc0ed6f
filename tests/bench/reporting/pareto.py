"""What reuse costs in picture against what it stores and computes: every variant a point, the front a line. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 380, 70, 40, 20, 50
COLOURS: Final = {"kv": "#2166ac", "hidden": "#b35806"}
Point = tuple[float, float]


class Scale(NamedTuple):
    """Of the axis across."""

    of: Callable[[float], float]
    label: Callable[[float], str]


def pareto(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two charts side by side: SSIM in the mask's box over KiB a template, and over the share of tokens computed."""
    charts = [
        _chart(rows, "KiB", "KiB a template", Scale(math.log10, lambda value: f"{10**value:.0f}")),
        _chart(
            rows,
            "tokens of full",
            "tokens computed, of full",
            Scale(lambda value: value, lambda value: f"{value:.2f}"),
        ),
    ]
    shifted = "".join(
        f'<g transform="translate({i * WIDTH},0)">{chart}</g>' for i, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{shifted}'
        f'<text x="{WIDTH}" y="{HEIGHT - 2}" text-anchor="middle" fill="#555">blue: kv, orange: hidden; hollow: not '
        "corrected; the larger, the more halo; dashed: nothing is better and cheaper</text></svg>\n"
    )


def front(points: Sequence[Point]) -> list[Point]:
    """Those of which none is both left of and above: less cost, more quality. In order of cost."""
    kept: list[Point] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not kept or quality > kept[-1][1]:
            kept.append((cost, quality))
    return kept


def _chart(rows: Sequence[Mapping[str, Any]], name: str, label: str, scale: Scale) -> str:
    points = [(scale.of(row[name]), float(row["SSIM box"])) for row in rows]
    across, up = _axis([x for x, _ in points]), _axis([y for _, y in points])

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - up[0]) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)
        return x, y

    dots = "".join(_dot(place(point), row) for point, row in zip(points, rows, strict=True))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, front(points)))
    ticks = "".join(_tick(place((across[0], level)), f"{level:.3f}") for level in _levels(up))
    ticks += "".join(
        f'<text x="{place((value, up[0]))[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
        f"{scale.label(value)}</text>"
        for value in _levels(across)
    )
    return (
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle">SSIM in the mask\'s box</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 18}" text-anchor="middle">{escape(label)}</text>{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#444" stroke-dasharray="4 3"/>{dots}'
    )


def _dot(at: Point, row: Mapping[str, Any]) -> str:
    colour = COLOURS[row["form"]]
    fill = colour if row["corrected"] else "white"
    title = escape(", ".join(f"{name} {value}" for name, value in row.items()))
    return (
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{3 + row["halo"]}" fill="{fill}" fill-opacity="0.7" '
        f'stroke="{colour}"><title>{title}</title></circle>'
    )


def _tick(at: Point, label: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at[1]:.1f}" y2="{at[1]:.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{at[1] + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _axis(values: Sequence[float]) -> Point:
    """A range around all of them that is not empty."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _levels(axis: Point) -> list[float]:
    return [axis[0] + (axis[1] - axis[0]) * part / 5 for part in range(6)]
