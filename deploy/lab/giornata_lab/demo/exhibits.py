"""What the demo edits, and what it shows of the adapters that ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from skimage import data

from giornata.wire.adapters import AskedControl, AskedLora
from giornata.wire.requests import EditParameters
from giornata_lab.model.adapters import lessons
from giornata_lab.model.adapters.lessons import AdapterCard, AdapterKind, control_image
from giornata_lab.model.scenes import SceneTask, sample, shapes
from giornata_lab.model.scenes.scene import paint as paint_thing
from giornata_lab.model.scenes.scene import plain, to_uint8
from giornata_lab.model.scenes.shapes import SceneShape, ground, rgb
from giornata_lab.model.segmenter.scenes import GROUND, seen
from giornata_tools.clients.http import HttpClient, uploaded
from giornata_tools.launcher.process import LaunchError

# What the demo edits, and the studio's samples as far as this project draws them.
#
# The demo edits two photographs and three procedural scenes; in the last one words say which thing is
# repainted. The studio has the same scenes, and masks of its own for photographs. Run ``python -m
# giornata_lab.demo.exhibits`` when scenes or ellipses change: it writes them to the page's folder.


Point: TypeAlias = tuple[float, float]
"""(x, y) as fractions of width and height."""

BESIDE_THE_ASTRONAUT: Final[Sequence[Point]] = (
    (0.590, 0.170), (0.612, 0.112), (0.665, 0.090), (0.720, 0.105), (0.748, 0.158),
    (0.742, 0.220), (0.705, 0.262), (0.650, 0.268), (0.606, 0.232),
)  # fmt: skip
"""On the backdrop, between her and the shuttle."""
BESIDE_THE_CUP: Final[Sequence[Point]] = (
    (0.815, 0.790), (0.850, 0.720), (0.905, 0.700), (0.960, 0.740), (0.980, 0.830),
    (0.960, 0.920), (0.905, 0.955), (0.845, 0.935), (0.812, 0.870),
)  # fmt: skip
"""On the wood of the table."""
PHOTOGRAPH_PADDING: Final = 88
"""`padding_mask_crop` of photographs, which are larger than the built-in model's own pictures."""
SCENE_SIDE: Final = 256
SCENES: Final = {"scene": SceneTask.ADD, "removal": SceneTask.REMOVE}
"""What is to be done in each procedural scene, by its name."""
SCENE_SEEDS: Final = {SceneTask.ADD: (2026, 22), SceneTask.REMOVE: (2026, 2)}
SEVERAL: Final = (
    SceneShape("circle", "red", 76, 78, radius=36, angle_deg=0),
    SceneShape("circle", "blue", 184, 70, radius=28, angle_deg=0),
    SceneShape("triangle", "yellow", 74, 186, radius=32, angle_deg=-3),
    SceneShape("square", "purple", 186, 184, radius=27, angle_deg=4),
)
"""The things of the scene in which words name the first."""
SEVERAL_SEED: Final = (2026, 11)
WORDS: Final = "the red circle"
GROWN_PX: Final = 4
"""A mask from words ends where the thing does: the edge of a thing is soft, and is repainted too."""
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


@dataclass(frozen=True)
class Exhibit:
    """One edit of the demo."""

    name: str
    """Name of its folder below ``out/demo``."""
    picture: Image.Image
    """RGB."""
    mask: Image.Image
    """Mode L, white where to edit; of an edit by words, which send none, what they name."""
    parameters: EditParameters
    """Prompt and crop; the rest is the model's default."""
    control: Image.Image | None = None
    """RGB: what the ControlNet of the parameters sees."""


def exhibits() -> tuple[Exhibit, ...]:
    """The edits that bring a mask and no adapter; equal at every call."""
    return (
        _photograph("astronaut", "a red star", data.astronaut(), BESIDE_THE_ASTRONAUT),  # NASA, public domain
        _photograph("coffee", "a white diamond", data.coffee(), BESIDE_THE_CUP),  # Rachel Michetti, CC0
        *map(scene, SCENES),
    )


def _photograph(name: str, prompt: str, pixels: NDArray[np.uint8], outline: Sequence[Point]) -> Exhibit:
    picture = Image.fromarray(pixels)
    asked = EditParameters(prompt=prompt, padding_mask_crop=PHOTOGRAPH_PADDING)
    return Exhibit(name, picture, paint(*picture.size, outline), asked)


def scene(name: str) -> Exhibit:
    """A procedural scene, one of `SCENES`."""
    task = SCENES[name]
    drawn = sample(np.random.default_rng(SCENE_SEEDS[task]), SCENE_SIDE, task, least_mask_px=64.0, clear=True)
    (thing,) = drawn.asked
    prompt = "remove it" if task is SceneTask.REMOVE else plain(thing.colour, thing.shape)
    picture, mask = Image.fromarray(drawn.before), shapes.image(drawn.mask)
    return Exhibit(name, picture, mask, EditParameters(prompt=prompt))


def by_words() -> Exhibit:
    """A procedural scene with several things. Words name one of them. It is equal at every call."""
    rng = np.random.default_rng(SEVERAL_SEED)
    picture = ground(rng, "noise", SCENE_SIDE, [rgb(thing.colour) for thing in SEVERAL])
    for thing in SEVERAL:
        paint_thing(picture, rng, thing)
    asked = EditParameters(prompt="a white star", mask_prompt=WORDS, grow_mask=GROWN_PX)
    return Exhibit("words", Image.fromarray(to_uint8(picture)), shapes.image(named(0)), asked)


def named(margin: int) -> shapes.Mask:
    """Every pixel within `margin` of what the words name in that scene."""
    colours, _ = seen([SEVERAL[0]], SCENE_SIDE)
    return shapes.around((colours != GROUND).astype(np.float32), 0, 0, SCENE_SIDE, margin)


def paint(width: int, height: int, outline: Sequence[Point]) -> Image.Image:
    """A mask as a person draws one: white inside of the outline, black elsewhere, mode L."""
    mask = Image.new("L", (width, height), 0)
    ImageDraw.Draw(mask).polygon([(x * width, y * height) for x, y in smooth(outline)], fill=255)
    return mask


def smooth(points: Sequence[Point], per_segment: int = 12) -> list[Point]:
    """The closed uniform Catmull-Rom spline through `points`, `per_segment` samples between two of them."""
    t = np.arange(per_segment)[:, None] / per_segment
    weights = (
        (-t + 2 * t**2 - t**3) / 2,
        (2 - 5 * t**2 + 3 * t**3) / 2,
        (t + 4 * t**2 - 3 * t**3) / 2,
        (t**3 - t**2) / 2,
    )
    around = [np.roll(points, shift, axis=0)[:, None] for shift in (1, 0, -1, -2)]
    curve = sum(weight * point for weight, point in zip(weights, around, strict=True))
    return [(float(x), float(y)) for x, y in np.reshape(curve, (-1, 2))]


def drawn() -> dict[str, Image.Image]:
    """Name of each file that is drawn → the picture (RGB) or mask (mode L, white is repainted).

    The scenes are those of the demo; the photographs lie in `FOLDER`, and the masks take their sizes.
    """
    pictures: dict[str, Image.Image] = {}
    for exhibit in map(scene, SCENES):
        pictures[f"{exhibit.name}.png"] = exhibit.picture
        pictures[f"{exhibit.name}-mask.png"] = exhibit.mask
    several = by_words()
    pictures[f"{several.name}.png"] = several.picture
    pictures[f"{several.name}-mask.png"] = shapes.image(named(GROWN_PX))
    for name, place in PLACES.items():
        with Image.open(FOLDER / f"{name}.jpg") as photograph:
            pictures[f"{name}-mask.png"] = shapes.image(_inside(place, *photograph.size))
    return pictures


def _inside(place: Ellipse, width: int, height: int) -> NDArray[np.bool_]:
    """Return whether the centre of each pixel lies in `place`; (height, width)."""
    across = (np.arange(width) + 0.5) / width - place.x
    down = (np.arange(height) + 0.5) / height - place.y
    inside: NDArray[np.bool_] = (
        (down / place.half_height)[:, None] ** 2 + (across / place.half_width)[None] ** 2
    ) <= 1
    return inside


if __name__ == "__main__":
    for name, picture in drawn().items():
        picture.save(FOLDER / name, "PNG", optimize=True, compress_level=9)


SIDE: Final = 128
"""Pixels; the adapters are trained on scenes of this size."""
LEAST_MASK_PX: Final = 48.0
SEEDS: Final[Mapping[str, tuple[int, int]]] = {
    "swapped": (2026, 5),
    "outlined": (2026, 7),
    "outline": (2026, 277),
}
"""By adapter: the seed of its scene."""


@dataclass(frozen=True)
class AdapterExhibit:
    """An adapter, and the edit that shows what it does."""

    adapter: AdapterCard
    exhibit: Exhibit
    """Without it."""
    control: Image.Image | None
    """RGB: what a ControlNet sees."""


def adapter_exhibits() -> tuple[AdapterExhibit, ...]:
    """One for each adapter that ships; equal at every call."""
    return tuple(map(_drawn, SEEDS))


def _drawn(name: str) -> AdapterExhibit:
    """The mask of a ControlNet's scene does not tell the place, size and turn of the thing; its outline does."""
    adapter = lessons.read_card(name)
    controlled = adapter.kind is AdapterKind.CONTROLNET
    rng = np.random.default_rng(SEEDS[name])
    drawn = sample(rng, SIDE, SceneTask.ADD, LEAST_MASK_PX, clear=True, free=controlled)
    (thing,) = drawn.asked
    asked = EditParameters(prompt=plain(thing.colour, thing.shape))
    exhibit = Exhibit(name, Image.fromarray(drawn.before), shapes.image(drawn.mask), asked)
    control = Image.fromarray(control_image(drawn.asked, SIDE)) if controlled else None
    return AdapterExhibit(adapter, exhibit, control)


async def under(door: HttpClient, shown: AdapterExhibit, model: str) -> Exhibit:
    """The edit of `shown` with its adapter; a LoRA is uploaded for `model`, and ready.

    Raises:
        Refused: the gateway refuses the LoRA's file.
        LaunchError: the LoRA failed.
    """
    exhibit, adapter = shown.exhibit, shown.adapter
    asked: dict[str, object]
    if adapter.kind is AdapterKind.CONTROLNET:
        asked = {"controlnets": (AskedControl(model=adapter.name, image=0),)}
    else:
        told = await uploaded(door, adapter.file, {"model": model, "name": adapter.name})
        if told["state"] != "ready":
            raise LaunchError(f"The LoRA {adapter.name} is {told['state']}: {told['error']}")
        asked = {"loras": (AskedLora(id=told["id"]),)}
    return replace(exhibit, parameters=exhibit.parameters.model_copy(update=asked), control=shown.control)
