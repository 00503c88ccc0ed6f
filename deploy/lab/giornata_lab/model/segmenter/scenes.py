"""Scenes with several things, and which of their pixels a phrase means. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.model.scenes.scene import MIN_RADIUS, PLURALS, SPELLINGS, TILT_DEG, article, paint, to_uint8
from giornata_lab.model.scenes.shapes import COLOURS, GROUNDS, SHAPES, Mask, SceneShape, coverage, ground, rgb

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


Option = TypeVar("Option")


class PhraseKind(StrEnum):
    """What a phrase tells of the things that it means."""

    NAMED = "named"
    """Colour and shape."""
    SHAPE = "shape"
    COLOUR = "colour"
    ALL = "all"
    """Every thing."""
    BACKGROUND = "background"
    """All that is no thing."""


FORMS: Final[Mapping[PhraseKind, tuple[str, ...]]] = {
    PhraseKind.NAMED: (
        "{colour} {shape}",
        "the {colour} {shape}",
        "{a} {colour} {shape}",
        "{colour} {shapes}",
        "the {colour} {shapes}",
        "all {colour} {shapes}",
    ),
    PhraseKind.SHAPE: ("{shape}", "the {shape}", "a {shape}", "{shapes}", "the {shapes}", "all {shapes}"),
    PhraseKind.COLOUR: (
        "{colour}",
        "the {colour} one",
        "the {colour} ones",
        "the {colour} thing",
        "the {colour} shape",
        "{a} {colour} thing",
        "all {colour} things",
        "all {colour} shapes",
        "everything {colour}",
    ),
    PhraseKind.ALL: ("all shapes", "all things", "the shapes", "the things", "every shape", "everything"),
    PhraseKind.BACKGROUND: ("background", "the background"),
}
"""One word means the same as several: "the red circle" is every red circle."""
CHANCES: Final[Mapping[PhraseKind, float]] = {
    PhraseKind.NAMED: 0.45,
    PhraseKind.SHAPE: 0.25,
    PhraseKind.COLOUR: 0.2,
    PhraseKind.ALL: 0.05,
    PhraseKind.BACKGROUND: 0.05,
}
"""Chances of the kinds among the phrases of training."""
NAMING: Final = (PhraseKind.NAMED, PhraseKind.SHAPE, PhraseKind.COLOUR)
"""Kinds that can name something that is not there."""


@dataclass(frozen=True)
class Phrase:
    """Words, and what they mean."""

    text: str
    kind: PhraseKind
    colour: str | None = None
    """Colour of the things that are meant; None for any."""
    shape: str | None = None
    """Shape of the things that are meant; None for any."""


def words() -> list[str]:
    """All words of all phrases, sorted: each is to be one token."""
    forms = re.sub(r"{\w+}", " ", " ".join(form for forms in FORMS.values() for form in forms))
    spellings = [s for colour in COLOURS for s in SPELLINGS.get(colour, (colour,))]
    return sorted({*forms.split(), *spellings, *SHAPES, *PLURALS.values(), "a", "an"})


def mask_of(scene: NamedScene, phrase: Phrase) -> Mask:
    """The pixels of `scene` that `phrase` means, (side, side); none where nothing of the kind is there."""
    thing: NDArray[np.bool_] = scene.colours != GROUND
    if phrase.kind is PhraseKind.BACKGROUND:
        return ~thing
    if phrase.colour is not None:
        thing = thing & (scene.colours == NAMES.index(phrase.colour))
    if phrase.shape is not None:
        thing = thing & (scene.shapes == SHAPES.index(phrase.shape))
    return thing


def draw(rng: np.random.Generator, scene: NamedScene, kind: PhraseKind, *, absent: bool = False) -> Phrase:
    """A phrase of `kind` for `scene`.

    Args:
        rng: decides.
        scene: what it is about.
        kind: one of `NAMING` where `absent` is true.
        absent: name something that is not there.
    """
    colour, shape = _absent(rng, scene, kind) if absent else _pick(rng, scene.kinds)
    spelled = _pick(rng, SPELLINGS.get(colour, (colour,)))
    text = _pick(rng, FORMS[kind]).format(
        colour=spelled, shape=shape, shapes=PLURALS[shape], a=article(spelled)
    )
    return Phrase(
        text,
        kind,
        colour if kind in {PhraseKind.NAMED, PhraseKind.COLOUR} else None,
        shape if kind in {PhraseKind.NAMED, PhraseKind.SHAPE} else None,
    )


def _absent(rng: np.random.Generator, scene: NamedScene, kind: PhraseKind) -> tuple[str, str]:
    """A colour and a shape that do not name anything together, or, in phrases of one of them, alone.

    Half of them have the colour or the shape of something that is there.
    """
    there = scene.kinds
    colours, shapes = ({pair[part] for pair in there} for part in (0, 1))
    pairs = [(colour, shape) for colour in NAMES for shape in SHAPES]
    if kind is PhraseKind.COLOUR:
        return _pick(rng, [pair for pair in pairs if pair[0] not in colours])
    if kind is PhraseKind.SHAPE:
        return _pick(rng, [pair for pair in pairs if pair[1] not in shapes])
    near = [pair for pair in pairs if (pair[0] in colours or pair[1] in shapes) and pair not in there]
    return _pick(rng, near if rng.uniform() < 0.5 else [pair for pair in pairs if pair not in there])


def _pick(rng: np.random.Generator, options: Sequence[Option]) -> Option:
    return options[int(rng.integers(len(options)))]
