"""The studio's samples as far as this project draws them: two procedural scenes, and the masks of the photographs.

Run ``python -m giornata_tools.launcher.demo.samples`` when scenes or ellipses change: it writes them to the page's
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_tools.launcher.demo.exhibits import SCENES, scene
from giornata_tools.model.scenes import masks

FOLDER: Final = Path(str(files("giornata_gateway") / "static" / "samples"))


@dataclass(frozen=True)
class Ellipse:
    """A mask; centre and half axes as fractions of width and height."""

    x: float
    y: float
    half_width: float
    half_height: float


PLACES: Final[Mapping[str, Ellipse]] = {
    "astronaut": Ellipse(0.67, 0.18, 0.075, 0.09),  # the backdrop between her and the shuttle
    "coffee": Ellipse(0.9, 0.82, 0.085, 0.13),  # the wood of the table
    "cat": Ellipse(0.13, 0.85, 0.1, 0.133),  # the pale fur of the breast
}
"""Where each photograph is plain enough for the built-in model."""


def drawn() -> dict[str, Image.Image]:
    """Name of each file that is drawn → the picture (RGB) or mask (mode L, white is repainted).

    The scenes are those of the demo; the photographs lie in `FOLDER`, and the masks take their sizes.
    """
    pictures: dict[str, Image.Image] = {}
    for exhibit in map(scene, SCENES):
        pictures[f"{exhibit.name}.png"] = exhibit.picture
        pictures[f"{exhibit.name}-mask.png"] = exhibit.mask
    for name, place in PLACES.items():
        with Image.open(FOLDER / f"{name}.jpg") as photograph:
            pictures[f"{name}-mask.png"] = masks.image(_inside(place, *photograph.size))
    return pictures


def _inside(place: Ellipse, width: int, height: int) -> NDArray[np.bool_]:
    """Whether the centre of each pixel lies in `place`; (height, width)."""
    across = (np.arange(width) + 0.5) / width - place.x
    down = (np.arange(height) + 0.5) / height - place.y
    inside: NDArray[np.bool_] = (
        (down / place.half_height)[:, None] ** 2 + (across / place.half_width)[None] ** 2
    ) <= 1
    return inside


if __name__ == "__main__":
    for name, picture in drawn().items():
        picture.save(FOLDER / name, "PNG", optimize=True, compress_level=9)
