"""Measure the segmenter that ships and write the figures into its card.

``python -m giornata_lab.model.segmenter --limit 100`` takes a minute on one CPU thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import torch

from giornata_lab.model.segmenter.clipseg import ReferenceSegmenter, judge, read_card
from giornata_tools.checkout import SEGMENTER

SIDES: Final = (128, 256)
"""Sides, in pixels, of the pictures that fresco is made for."""


@click.command(context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path), default=SEGMENTER, help="The checkpoint.")
@click.option("--limit", type=click.IntRange(1), default=100, help="Held-out scenes of each size.")
@click.option("--threads", type=int, default=1, help="CPU threads.")
def main(*, folder: Path, limit: int, threads: int) -> None:
    """Measure the segmenter in FOLDER on held-out scenes; rewrites its card."""
    torch.set_num_threads(threads)
    segmenter = ReferenceSegmenter.load(folder)
    measured = {side: {"scenes": float(limit), **judge(segmenter, side, limit)} for side in SIDES}
    for side, figures in measured.items():
        click.echo(f"{side} pixels: {figures}")
    read_card(folder).model_copy(update={"measured": measured}).write(folder)


if __name__ == "__main__":
    main()
