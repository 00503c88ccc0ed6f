"""Charts drawn by matplotlib, as SVG."""

from __future__ import annotations

import io
from typing import Any, Final

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from giornata_lab.loadgen.charts import Chart, TimelineChart

COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#555555")
"""Paul Tol's bright scheme: told apart by the colour-blind too."""
SEEN: Final = 0.003
"""Least width of a bar, as a share of the timeline's: a narrower one would not be seen."""
INDENT: Final = "\N{NO-BREAK SPACE}" * 3
LABEL_POINTS: Final = 140
"""Width of the names beside a timeline."""
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


def timeline(chart: TimelineChart) -> Figure:
    """The drawing of `chart`, the first bar at the top.

    Raises:
        ValueError: it has no bars.
    """
    if not chart.bars:
        raise ValueError("a timeline needs one bar or more")
    kinds = dict.fromkeys(bar.colour for bar in chart.bars)
    least = SEEN * max(ended for bar in chart.bars for _, ended in bar.spans)
    colours = dict(zip(kinds, COLOURS, strict=False))
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(9.6, 0.8 + 0.21 * len(chart.bars)), layout="constrained")
        axes = drawn.add_subplot(title=chart.title, xlabel=chart.across)
        for place, bar in enumerate(chart.bars):
            pieces = [(began, max(least, ended - began)) for began, ended in bar.spans]
            axes.broken_barh(pieces, (place - 0.36, 0.72), facecolor=colours[bar.colour])
            took = sum(ended - began for began, ended in bar.spans)
            right = max(began + wide for began, wide in pieces)
            axes.text(
                right + least,
                place,
                f"{took:,.{0 if took >= 10 else 1}f}",
                va="center",
                fontsize=7,
                color="#555555",
            )
        labels = [f"{INDENT * bar.depth}{bar.name}" for bar in chart.bars]
        axes.set_yticks(range(len(labels)), labels, fontsize=8, ha="left")
        axes.tick_params(axis="y", pad=LABEL_POINTS, length=0)
        axes.set_ylim(len(chart.bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.08 * least / SEEN)  # with room for the last number
        axes.grid(visible=False, axis="y")
        legend = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
        drawn.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return drawn


def svg(drawn: Figure) -> str:
    """`drawn` as an SVG file; equal drawings give equal text."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
