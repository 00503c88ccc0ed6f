"""What reuse costs in picture against what it stores and computes: every variant a point, the front a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from giornata_lab.loadgen.drawing import STYLE

COLOURS: Final = {"kv": "#2166ac", "hidden": "#b35806"}
CAPTION: Final = (
    "blue: kv, orange: hidden; hollow: not corrected; the larger, the more halo; "
    "dashed: nothing is better and cheaper"
)
Point = tuple[float, float]


def pareto(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Two charts side by side: SSIM in the mask's box over KiB a template, and over the share of tokens computed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.2, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw(left, rows, "KiB")
        left.set(xscale="log", xlabel="KiB a template")
        _draw(right, rows, "tokens of full")
        right.set(xlabel="tokens computed, of full")
        figure.supxlabel(CAPTION, fontsize="small")
    return figure


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats with less cost and more quality, in order of cost."""
    kept: list[Point] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not kept or quality > kept[-1][1]:
            kept.append((cost, quality))
    return kept


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    points = [(float(row[name]), float(row["SSIM box"])) for row in rows]
    axes.plot(*zip(*front(points), strict=True), color="#444444", linestyle="--", label="front")
    for (x, y), row in zip(points, rows, strict=True):
        colour = COLOURS[row["form"]]
        [dot] = axes.plot(
            x,
            y,
            "o",
            color=colour,
            markersize=4 + 2 * row["halo"],
            fillstyle="full" if row["corrected"] else "none",
        )
        dot.set_label(", ".join(f"{name} {value}" for name, value in row.items()))
    axes.set(ylabel="SSIM in the mask's box")
