"""A scene: what is there, what the caption asks for, and how the picture looks when it is done."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata_lab.model.scenes import shapes
from giornata_lab.model.scenes.shapes import (
    COLOURS,
    GROUNDS,
    SHAPES,
    Mask,
    Picture,
    SceneShape,
    coverage,
    ground,
    rgb,
)

# What captions say. Every word that training knows is here.


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


MIN_RADIUS: Final = 8.0
"""Pixels. A thing of 16 pixels is two tokens wide."""
MARGIN: Final = (1.15, 1.3)
"""Half the mask's side over the thing's radius."""
TILT_DEG: Final = 5.0
FREE_SIZES: Final = (0.5, 0.9)
"""Radius of a thing that lies anywhere, over the largest that fits into the mask."""
SHADING: Final = 0.12
"""How much darker the bottom and brighter the top of a thing are."""
TASKS: Final = {"add": 0.56, "add_several": 0.06, "remove": 0.34, "empty": 0.04}


class SceneTask(StrEnum):
    """What an edit of the scene is to do."""

    ADD = "add"
    ADD_SEVERAL = "add_several"
    REMOVE = "remove"
    EMPTY = "empty"
    """No mask and no caption: the picture comes back, as in a template run."""


@dataclass(frozen=True)
class Scene:
    """One edit with its answer."""

    task: SceneTask
    ground: str
    """Kind of the background."""
    before: NDArray[np.uint8]
    """(side, side, 3), the picture that is edited."""
    after: NDArray[np.uint8]
    """(side, side, 3), the picture that the caption asks for; a corner of a thing may stick out of the mask."""
    mask: Mask
    caption: str
    asked: tuple[SceneShape, ...]
    """What the caption asks for."""


@dataclass(frozen=True)
class SceneRegion:
    """Where the edit takes place, in pixels: a square of half side `half` about (x, y) on a canvas of `side`."""

    side: int
    x: float
    y: float
    half: float


def paint(picture: Picture, rng: np.random.Generator, thing: SceneShape) -> None:
    """Draw `thing` onto `picture`, in place, with soft shading and a slightly varied colour."""
    cover = coverage(thing, picture.shape[0])
    height, width = cover.alpha.shape
    patch = picture[cover.top : cover.top + height, cover.left : cover.left + width]
    rows = (np.arange(height) + cover.top - thing.y) / thing.radius
    shade = (1 - SHADING * rows.clip(-1, 1)).astype(np.float32)[:, None, None]
    colour = (rgb(thing.colour) + rng.uniform(-0.025, 0.025, 3).astype(np.float32)).clip(0, 1)
    patch += ((colour * shade).clip(0, 1) - patch) * cover.alpha[..., None]


def sample(
    rng: np.random.Generator,
    side: int,
    task: SceneTask | None = None,
    least_mask_px: float = 20.0,
    *,
    clear: bool = False,
    free: bool = False,
) -> Scene:
    """A random scene.

    Args:
        rng: decides everything.
        side: of the canvas, in pixels.
        task: drawn by `TASKS` where it is None.
        least_mask_px: least side of the mask's region.
        clear: keep the other things out of the mask, and use no shape-revealing masks; for measuring.
        free: of `Task.ADD`: the mask does not tell the thing's place, size and turn.
    """
    task = task or SceneTask(rng.choice(list(TASKS), p=list(TASKS.values())))
    least = least_mask_px * (1.4 if task is SceneTask.ADD_SEVERAL else 1.0) / 2
    half = float(np.clip(side * np.sqrt(shapes.ratio(rng)) / 2 * rng.uniform(0.9, 1.1), least, 0.42 * side))
    x, y = (float(rng.uniform(0.9 * half, side - 0.9 * half)) for _ in range(2))
    region = SceneRegion(side, x, y, half)
    asked = [_free(rng, region)] if free else _asked(rng, task, region)
    others = _others(rng, region, clear=clear)
    kind = str(rng.choice(list(GROUNDS)))
    picture = ground(rng, kind, side, [rgb(t.colour) for t in (*asked, *others)])
    for thing in others:
        paint(picture, rng, thing)
    bare = picture.copy()
    for thing in asked:
        paint(picture, rng, thing)
    mask = _mask(rng, task, asked, region, clear=clear)
    before, after = (bare, picture) if task in {SceneTask.ADD, SceneTask.ADD_SEVERAL} else (picture, bare)
    return Scene(
        task, kind, to_uint8(before), to_uint8(after), mask, _caption(rng, task, asked), tuple(asked)
    )


def _asked(rng: np.random.Generator, task: SceneTask, region: SceneRegion) -> list[SceneShape]:
    """The things inside of the mask: to be added, or (one) to be removed."""
    x, y, half = region.x, region.y, region.half
    if task is SceneTask.EMPTY:
        return []
    margin = rng.uniform(*MARGIN)
    if task is not SceneTask.ADD_SEVERAL:
        return [_thing(rng, x + rng.normal(0, 0.02) * half, y + rng.normal(0, 0.02) * half, half / margin)]
    same, gap = bool(rng.uniform() < 0.6), half * 0.5
    first = _thing(rng, 0, 0, half / margin * 0.52)
    places = [(x - gap, y), (x + gap, y)] if rng.uniform() < 0.5 else [(x, y - gap), (x, y + gap)]
    if rng.uniform() < 0.25:
        places = [(x - gap, y + 0.45 * half), (x + gap, y + 0.45 * half), (x, y - 0.45 * half)]
    return [
        SceneShape(t.shape, t.colour, px, py, first.radius, t.angle_deg)
        for px, py in places
        for t in [first if same or len(places) == 3 else _thing(rng, 0, 0, 1)]
    ]


def _free(rng: np.random.Generator, region: SceneRegion) -> SceneShape:
    """A thing of any size and turn, anywhere in the mask."""
    radius = region.half / MARGIN[0] * float(rng.uniform(*FREE_SIZES))
    room = region.half - radius
    x, y = (centre + float(rng.uniform(-room, room)) for centre in (region.x, region.y))
    return replace(_thing(rng, x, y, radius), angle_deg=float(rng.uniform(-180, 180)))


def _others(rng: np.random.Generator, region: SceneRegion, *, clear: bool) -> list[SceneShape]:
    """Up to three things elsewhere, which may overlap each other and reach a little into the mask."""
    side, x, y, half = region.side, region.x, region.y, region.half
    things = []
    for _ in range(int(rng.integers(0, 4))):
        radius = float(np.exp(rng.uniform(np.log(MIN_RADIUS), np.log(max(0.22 * side, MIN_RADIUS + 1)))))
        u, v = (float(rng.uniform(0.3 * radius, side - 0.3 * radius)) for _ in range(2))
        apart = max(abs(u - x), abs(v - y)) - half
        if apart > radius * (1.35 if clear else 0.6):
            things.append(_thing(rng, u, v, radius))
    return things


def _thing(rng: np.random.Generator, x: float, y: float, radius: float) -> SceneShape:
    angle = float(rng.uniform(-TILT_DEG, TILT_DEG))
    return SceneShape(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS))), x, y, max(radius, 1.0), angle)


def _mask(
    rng: np.random.Generator, task: SceneTask, asked: list[SceneShape], region: SceneRegion, *, clear: bool
) -> Mask:
    side, x, y, half = region.side, region.x, region.y, region.half
    if task is SceneTask.EMPTY:
        return np.zeros((side, side), bool)
    kind = rng.choice(["box", "ellipse", "brush", "thing"], p=[0.4, 0.2, 0.25, 0.15])
    stretch = rng.uniform(0.92, 1.15, 2)
    if kind == "thing" and len(asked) == 1 and not clear:
        cover = coverage(asked[0], side)
        return shapes.around(cover.alpha, cover.left, cover.top, side, int(rng.integers(1, 6)))
    if kind == "ellipse":
        return shapes.ellipse(side, x, y, 1.12 * half * stretch[0], 1.12 * half * stretch[1])
    if kind == "brush":
        return shapes.brush(rng, side, x, y, 1.15 * half)
    return shapes.box(side, x, y, half * stretch[0], half * stretch[1])


def _caption(rng: np.random.Generator, task: SceneTask, asked: list[SceneShape]) -> str:
    if task is SceneTask.EMPTY:
        return ""
    if task is SceneTask.REMOVE:
        return remove_caption(rng)
    return add_caption(rng, [(t.colour, t.shape) for t in asked])


def to_uint8(picture: Picture) -> NDArray[np.uint8]:
    """[0, 1] rounded to 8 bits."""
    return (picture * 255 + 0.5).astype(np.uint8)
