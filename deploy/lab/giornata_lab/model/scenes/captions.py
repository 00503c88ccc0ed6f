"""What captions say. Every word that training knows is here."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import numpy as np

from giornata_lab.model.scenes.outlines import SHAPES
from giornata_lab.model.scenes.palette import COLOURS

ADD: Final = (
    "{one}",
    "{a} {one}",
    "{a} {one}",
    "{a} {one}",
    "the {one}",
    "put {a} {one} here",
    "paint {a} {one}",
    "add {a} {one}",
    "draw {a} {one} here",
    "a photo of {a} {one}",
)
ADD_SEVERAL: Final = ("{many}", "{many}", "put {many} here", "paint {many}", "add {many}")
REMOVE: Final = ("remove it", "remove it", "remove", "erase it", "nothing", "background", "clean background")
COUNTS: Final = {2: "two", 3: "three"}
PLURALS: Final = {shape: f"{shape}es" if shape == "cross" else f"{shape}s" for shape in SHAPES}
SPELLINGS: Final = {"gray": ("gray", "grey")}


def words() -> list[str]:
    """All words of all captions, sorted: each is to be one token."""
    templates = re.sub(r"{\w+}", " ", " ".join((*ADD, *ADD_SEVERAL, *REMOVE)))
    spellings = [s for colour in COLOURS for s in SPELLINGS.get(colour, (colour,))]
    return sorted(
        {*templates.split(), *spellings, *SHAPES, *PLURALS.values(), *COUNTS.values(), "a", "an", "and"}
    )


def add_caption(rng: np.random.Generator, things: list[tuple[str, str]]) -> str:
    """Asks for `things`, (colour, shape) each: "put a teal ring here", "two blue squares", "a red star and a cross"."""
    if len(things) == 1:
        colour, shape = _spell(rng, things[0][0]), things[0][1]
        return _pick(rng, ADD).format(a=article(colour), one=f"{colour} {shape}")
    groups = [
        f"{article(name) if count == 1 else COUNTS[count]} {name} {shape if count == 1 else PLURALS[shape]}"
        for (colour, shape), count in Counter(things).items()
        for name in [_spell(rng, colour)]
    ]
    return _pick(rng, ADD_SEVERAL).format(many=" and ".join(groups))


def plain(colour: str, shape: str) -> str:
    """The plainest request for one thing: "a red star"."""
    return f"{article(colour)} {colour} {shape}"


def remove_caption(rng: np.random.Generator) -> str:
    """Asks for the background alone."""
    return _pick(rng, REMOVE)


def _spell(rng: np.random.Generator, colour: str) -> str:
    return _pick(rng, SPELLINGS.get(colour, (colour,)))


def article(colour: str) -> str:
    """That of a thing whose colour is named first."""
    return "an" if colour[0] in "aeiou" else "a"


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]
