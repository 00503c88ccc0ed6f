"""Charts drawn by matplotlib, as SVG."""

from __future__ import annotations

import io
from typing import Any, Final

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from giornata_lab.loadgen.charts import Chart

COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#555555")
"""Paul Tol's bright scheme: told apart by the colour-blind too."""
STYLE: Final[Any] = {
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "figure.facecolor": "white",  # also where a page is dark
    "grid.color": "#dddddd",
    "svg.fonttype": "none",
    "svg.hashsalt": "giornata",
}


def figure(chart: Chart) -> Figure:
    """The drawing of `chart`.

    Raises:
        ValueError: it has no points.
    """
    if not any(chart.lines.values()):
        raise ValueError("a chart needs one point or more")
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = drawn.add_subplot(title=chart.title, xlabel=chart.across, ylabel=chart.up)
        joined, marker = chart.drawn.value
        for name, points in chart.lines.items():
            axes.plot(*zip(*points, strict=True), label=name, linestyle=joined, marker=marker)
        axes.set_xlim(left=0)
        if chart.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        drawn.legend(loc="outside right upper", frameon=False)
    return drawn


def svg(drawn: Figure) -> str:
    """`drawn` as an SVG file; equal drawings give equal text."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
