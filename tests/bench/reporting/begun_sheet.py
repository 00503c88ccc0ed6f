"""Pictures side by side: an edit with all of its steps, and begun with another edit's latent, by steps saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from giornata_tools.model.painting import Pixels

GAP_PX: Final = 6
TEXT_PX: Final = 16
WHITE, BLACK = (255, 255, 255), (20, 20, 20)


@dataclass(frozen=True)
class Sample:
    """One row of the sheet."""

    words: str
    """What was asked for, and whose latent it began with."""
    pictures: Sequence[Pixels]
    """(side, side, 3): before, all steps, then by steps saved."""


def sheet(samples: Sequence[Sample], saved: Sequence[int], steps: int) -> Image.Image:
    """A row a sample under its words, below the columns' names."""
    side = samples[0].pictures[0].shape[0]
    names = ["before", "all steps", *(f"{step} of {steps} saved" for step in saved)]
    width = GAP_PX + len(names) * (side + GAP_PX)
    height = TEXT_PX + 2 * GAP_PX + len(samples) * (TEXT_PX + side + 2 * GAP_PX)
    made = Image.new("RGB", (width, height), WHITE)
    pen, font = ImageDraw.Draw(made), ImageFont.load_default(13)
    for column, name in enumerate(names):
        pen.text((GAP_PX + column * (side + GAP_PX), GAP_PX), name, BLACK, font)
    top = TEXT_PX + 2 * GAP_PX
    for sample in samples:
        pen.text((GAP_PX, top), sample.words, BLACK, font)
        top += TEXT_PX + GAP_PX
        for column, picture in enumerate(sample.pictures):
            made.paste(Image.fromarray(picture), (GAP_PX + column * (side + GAP_PX), top))
        top += side + GAP_PX
    return made
