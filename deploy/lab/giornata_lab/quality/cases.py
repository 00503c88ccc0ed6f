"""The held-out edits: always the same scenes, which training has not seen. Pure.

Composed of the parts of :mod:`giornata_lab.model.scenes`, as its `sample` does, with colour, shape and ground dealt
out evenly and with what measuring needs: the mask is at least four tokens wide and high, the thing lies wholly inside
of it and stands out from its ground, and no other thing reaches into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata_lab.model.scenes import COLOURS, GROUNDS, SHAPES, Scene, SceneTask, shapes
from giornata_lab.model.scenes.scene import MARGIN, MIN_RADIUS, TILT_DEG, paint, plain, to_uint8
from giornata_lab.model.scenes.shapes import Mask, SceneShape, coverage, ground, rgb

ENTROPY: Final = 0x47494F52
"""First word of every case's seed. Training's is a small number, so that no scene is in both."""
ADDITIONS: Final = {128: 4, 256: 1}
"""Side in pixels → edits for each colour and shape."""
REMOVALS: Final = {128: 16, 256: 6}
"""Side in pixels → edits for each kind of ground."""
LEAST_MASK_PX: Final = 32
"""Width and height of every mask: four tokens of eight pixels."""
HALF_MASK_PX: Final = 18.0
"""Least half side that is drawn; masks are up to 8 % smaller than drawn, and the picture's edge may cut them."""
LEAST_CONTRAST: Final = 0.15
"""Euclidean distance in [0, 1] RGB from the ground, for `VISIBLE_PART` of a thing's pixels."""
VISIBLE_PART: Final = 0.95
OTHERS_MAX: Final = 3
REACH: Final = 1.3
"""How far masks and things reach from their centres, over half side and radius."""


@dataclass(frozen=True)
class QualityCaseSpec:
    """Which edit a case is, before its scene is drawn."""

    index: int
    """Place in the whole set; also the seed of the edit's noise."""
    task: SceneTask
    """`ADD` or `REMOVE`."""
    side: int
    """Side of the picture, in pixels."""
    ground: str
    colour: str
    shape: str
    """Kind of the thing to be added or removed."""

    @property
    def name(self) -> str:
        """Unique, fit for a file's name, sorted like the set: ``007-add-128-red-circle``."""
        return f"{self.index:03}-{self.task}-{self.side}-{self.colour}-{self.shape}"


@dataclass(frozen=True)
class QualityCase:
    """One edit with its true answer."""

    slot: QualityCaseSpec
    scene: Scene

    @property
    def bare(self) -> NDArray[np.uint8]:
        """(side, side, 3), the scene without the thing."""
        return self.scene.before if self.slot.task is SceneTask.ADD else self.scene.after


def slots() -> list[QualityCaseSpec]:
    """The whole set, in order: additions by side, then removals by side."""
    kinds, colours = list(GROUNDS), list(COLOURS)
    found: list[QualityCaseSpec] = []
    for side, copies in ADDITIONS.items():
        for i, colour in enumerate(colours):
            for j, shape in enumerate(SHAPES):
                for k in range(copies):
                    kind = kinds[(i + j + k) % len(kinds)]
                    found.append(QualityCaseSpec(len(found), SceneTask.ADD, side, kind, colour, shape))
    for side, copies in REMOVALS.items():
        for i, kind in enumerate(kinds):
            for k in range(copies):
                n = i * copies + k
                colour, shape = colours[n % len(colours)], SHAPES[(n + n // len(colours)) % len(SHAPES)]
                found.append(QualityCaseSpec(len(found), SceneTask.REMOVE, side, kind, colour, shape))
    return found


def spread(every: Sequence[QualityCaseSpec], limit: int | None) -> list[QualityCaseSpec]:
    """`limit` of `every`, evenly spread over the set; all of them where it is None or larger."""
    n = len(every) if limit is None else min(limit, len(every))
    return [every[(2 * i + 1) * len(every) // (2 * n)] for i in range(n)]


def draw(slot: QualityCaseSpec) -> QualityCase:
    """The case of `slot`: the first scene of its own sequence of seeds that is fit to be measured."""
    for attempt in count():
        scene = _compose(np.random.default_rng((ENTROPY, slot.side, slot.index, attempt)), slot)
        if is_fit(scene):
            return QualityCase(slot, scene)
    raise AssertionError("unreachable")


def digest(cases: Sequence[QualityCase]) -> str:
    """12 hex digits of the sha-256 over names, captions, masks and pixels: equal where the edits are equal."""
    total = hashlib.sha256()
    for case in cases:
        scene = case.scene
        total.update(f"{case.slot.name}\0{scene.caption}\0".encode())
        for part in (scene.before, scene.after, scene.mask):
            total.update(part.tobytes())
    return total.hexdigest()[:12]


def _compose(rng: np.random.Generator, slot: QualityCaseSpec) -> Scene:
    side = slot.side
    wanted = side * np.sqrt(shapes.ratio(rng)) / 2 * rng.uniform(0.9, 1.1)
    half = float(np.clip(wanted, HALF_MASK_PX, 0.42 * side))
    x, y = (float(rng.uniform(0.9 * half, side - 0.9 * half)) for _ in range(2))
    near, angle = rng.normal(0, 0.02, 2) * half, float(rng.uniform(-TILT_DEG, TILT_DEG))
    thing = SceneShape(
        slot.shape, slot.colour, x + near[0], y + near[1], half / float(rng.uniform(*MARGIN)), angle
    )
    others = _others(rng, side, x, y, half)
    picture = ground(rng, slot.ground, side, [rgb(t.colour) for t in (thing, *others)])
    for other in others:
        paint(picture, rng, other)
    bare = picture.copy()
    paint(picture, rng, thing)
    mask = _mask(rng, side, x, y, half)
    adding = slot.task is SceneTask.ADD
    before, after = (bare, picture) if adding else (picture, bare)
    caption = plain(slot.colour, slot.shape) if adding else "remove it"
    return Scene(slot.task, slot.ground, to_uint8(before), to_uint8(after), mask, caption, (thing,))


def _others(rng: np.random.Generator, side: int, x: float, y: float, half: float) -> list[SceneShape]:
    """Things beside the mask, whose half side is `half` about (x, y)."""
    things = []
    for _ in range(int(rng.integers(0, OTHERS_MAX + 1))):
        radius = float(np.exp(rng.uniform(np.log(MIN_RADIUS), np.log(0.22 * side))))
        u, v = (float(rng.uniform(0.3 * radius, side - 0.3 * radius)) for _ in range(2))
        if max(abs(u - x), abs(v - y)) > REACH * (half + radius):
            shape, colour = str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS)))
            things.append(SceneShape(shape, colour, u, v, radius, float(rng.uniform(-TILT_DEG, TILT_DEG))))
    return things


def _mask(rng: np.random.Generator, side: int, x: float, y: float, half: float) -> Mask:
    """A box, an ellipse or brush strokes; none that gives the shape away."""
    kind, (across, down) = (
        rng.choice(["box", "ellipse", "brush"], p=[0.5, 0.25, 0.25]),
        rng.uniform(0.92, 1.15, 2),
    )
    if kind == "ellipse":
        return shapes.ellipse(side, x, y, 1.12 * half * across, 1.12 * half * down)
    if kind == "brush":
        return shapes.brush(rng, side, x, y, 1.15 * half)
    return shapes.box(side, x, y, half * across, half * down)


def is_fit(scene: Scene) -> bool:
    """Whether the thing lies wholly inside of the mask, stands out from its ground, and the mask is large enough."""
    if not np.array_equal(scene.before[~scene.mask], scene.after[~scene.mask]):
        return False  # the thing sticks out of the mask
    if min(int(scene.mask.any(axis).sum()) for axis in (0, 1)) < LEAST_MASK_PX:
        return False
    (thing,) = scene.asked
    cover = coverage(thing, scene.mask.shape[0])
    height, width = cover.alpha.shape
    place = slice(cover.top, cover.top + height), slice(cover.left, cover.left + width)
    gap = np.linalg.norm((scene.after[place].astype(np.float32) - scene.before[place]) / 255, axis=2)
    return bool((gap[cover.alpha == 1] >= LEAST_CONTRAST).mean() >= VISIBLE_PART)
