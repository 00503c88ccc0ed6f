"""A picture of a fit: every sample's predicted time against its measured one. Needs matplotlib, the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from giornata_denoiser.profiling.fitting import FittedSample


def scatter(path: Path, title: str, points: Sequence[FittedSample]) -> None:
    """Write an SVG file with logarithmic axes in ms; predictions are exact on the dashed line."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="measured, ms", ylabel="predicted, ms", aspect="equal")
    axes.loglog(
        [p.measured_ms for p in points], [p.predicted_ms for p in points], "o", gid="samples", alpha=0.6
    )
    axes.axline((1, 1), (10, 10), linestyle="--", color="grey")
    axes.grid(visible=True)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format="svg")
