"""Scenes with several things, where the colour and the shape that are seen at every pixel are known. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.model.scenes.grounds import GROUNDS, ground
from giornata_lab.model.scenes.outlines import SHAPES, SceneShape, coverage
from giornata_lab.model.scenes.palette import COLOURS, rgb
from giornata_lab.model.scenes.scene import MIN_RADIUS, TILT_DEG, paint, to_uint8

HELD_OUT: Final = 0x53494E4F
"""First word of the seeds of scenes for measuring. Training's is a small number, so that no scene is in both."""
THINGS_MAX: Final = 4
LARGEST_RADIUS: Final = 0.33
"""Largest radius of a thing, as a part of the picture's side."""
LIKENESS: Final = 0.2
"""Chance that a thing repeats an earlier one's colour, its shape, or both: one chance each."""
APART: Final = 0.95
"""Least distance of two things' centres, over the sum of their radii."""
ATTEMPTS: Final = 12
"""At placing a thing apart from the others, before it is left out."""
GROUND: Final = -1
"""What maps say where no thing is seen."""
SEEN: Final = 0.5
"""A thing is seen at a pixel of which it covers this much."""
NAMES: Final = tuple(COLOURS)
"""Colours in the order of their indices."""


@dataclass(frozen=True)
class NamedScene:
    """A picture, and what is seen where."""

    picture: NDArray[np.uint8]
    """(side, side, 3)."""
    colours: NDArray[np.int8]
    """(side, side), index into `NAMES` of the thing that is seen there, or `GROUND`."""
    shapes: NDArray[np.int8]
    """(side, side), index into `SHAPES`, or `GROUND`."""

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Colour and shape of what is seen, each once, sorted by index."""
        thing = self.colours != GROUND
        pairs = np.unique(np.stack([self.colours[thing], self.shapes[thing]], axis=1), axis=0)
        return [(NAMES[colour], SHAPES[shape]) for colour, shape in pairs]


def sample(rng: np.random.Generator, side: int, shrunk: int = 1) -> NamedScene:
    """A random scene.

    Args:
        rng: decides everything.
        side: of the picture, in pixels.
        shrunk: how many times larger the picture is drawn, before it is scaled down as services scale it.
    """
    drawn = side * shrunk
    things = _things(rng, drawn)
    picture = ground(rng, str(rng.choice(list(GROUNDS))), drawn, [rgb(thing.colour) for thing in things])
    for thing in things:
        paint(picture, rng, thing)
    pixels = Image.fromarray(to_uint8(picture)).resize((side, side), Image.Resampling.BILINEAR)
    scaled = [
        replace(thing, x=thing.x / shrunk, y=thing.y / shrunk, radius=thing.radius / shrunk)
        for thing in things
    ]
    return NamedScene(np.asarray(pixels), *seen(scaled, side))


def held_out(side: int, count: int) -> list[NamedScene]:
    """The first `count` scenes for measuring, equal at every call."""
    return [sample(np.random.default_rng((HELD_OUT, side, index)), side) for index in range(count)]


def seen(things: list[SceneShape], side: int) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Maps (side, side) of colours and of shapes; of two things at one place the later one is seen."""
    colours, shapes = (np.full((side, side), GROUND, np.int8) for _ in range(2))
    for thing in things:
        cover = coverage(thing, side)
        height, width = cover.alpha.shape
        place = slice(cover.top, cover.top + height), slice(cover.left, cover.left + width)
        there = cover.alpha >= SEEN
        colours[place][there] = NAMES.index(thing.colour)
        shapes[place][there] = SHAPES.index(thing.shape)
    return colours, shapes


def _things(rng: np.random.Generator, side: int) -> list[SceneShape]:
    """One to `THINGS_MAX` things that hardly overlap."""
    things: list[SceneShape] = []
    for _ in range(int(rng.integers(1, THINGS_MAX + 1))):
        colour, shape = _kind(rng, things)
        radius = float(np.exp(rng.uniform(np.log(MIN_RADIUS), np.log(LARGEST_RADIUS * side))))
        for _ in range(ATTEMPTS):
            x, y = (float(rng.uniform(0.6 * radius, side - 0.6 * radius)) for _ in range(2))
            if all(np.hypot(x - t.x, y - t.y) >= APART * (radius + t.radius) for t in things):
                things.append(
                    SceneShape(shape, colour, x, y, radius, float(rng.uniform(-TILT_DEG, TILT_DEG)))
                )
                break
    return things


def _kind(rng: np.random.Generator, things: list[SceneShape]) -> tuple[str, str]:
    """Colour and shape of the next thing, often like an earlier one's: phrases must tell such things apart."""
    colour, shape = str(rng.choice(NAMES)), str(rng.choice(SHAPES))
    if not things:
        return colour, shape
    like, chance = things[int(rng.integers(len(things)))], float(rng.uniform())
    if chance < 2 * LIKENESS:
        colour = like.colour
    if LIKENESS <= chance < 3 * LIKENESS:
        shape = like.shape
    return colour, shape
