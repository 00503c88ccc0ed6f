"""What sinopia can be asked for, and which pixels a phrase means. Every word that it knows is here. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from giornata_lab.model.scenes.captions import PLURALS, SPELLINGS, article
from giornata_lab.model.scenes.masks import Mask
from giornata_lab.model.scenes.outlines import SHAPES
from giornata_lab.model.scenes.palette import COLOURS
from giornata_lab.model.segmenter.scenes import GROUND, NAMES, NamedScene

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
