"""The edits that show how late a LoRA may join: pictures, each with a mask and a prompt."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from skimage import data

from giornata.picture_files import picture_parts
from giornata.wire.messages import INLINE_BYTES
from giornata.wire.models import ModelCard

# Files of pictures that requests carry. Pure.


SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp")
"""Endings of pictures in a folder."""


def png(picture: Image.Image, **settings: int) -> bytes:
    """A PNG file; `settings` are Pillow's."""
    file = io.BytesIO()
    picture.save(file, "PNG", **settings)
    return file.getvalue()


def upright_size(file: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded picture, as it is shown.

    Raises:
        ValueError: it is no picture.
    """
    try:
        parts = picture_parts(file)
        with Image.open(io.BytesIO(parts.file)) as picture:
            return picture.size if parts.orientation <= 4 else picture.size[::-1]
    except (OSError, ValueError) as error:
        raise ValueError(f"it is no picture that can be read: {error}") from error


# What is edited to see how late a LoRA may join: pictures, each with a mask and a prompt.


SMALL: Final = 256
"""Native size in pixels up to which a model is given scenes, which the one that ships knows; others photographs."""
SCENES: Final = Path(__file__).with_name("scenes")
"""Eight held-out edits of 128 pixels that add a thing, drawn by `python -m giornata_lab.quality.probes`."""
MASK_SUFFIX: Final = "-mask.png"
PROMPT_SUFFIX: Final = ".txt"
WHITE: Final = 128
"""Luma from which on a mask's pixel is repainted, as `mask_mode` `white` has it."""
PHOTOGRAPHS: Final[Mapping[str, tuple[str, tuple[float, float, float, float]]]] = {
    "astronaut": ("a red paper star", (0.59, 0.08, 0.76, 0.28)),  # NASA, public domain
    "coffee": ("a chocolate biscuit", (0.80, 0.68, 0.98, 0.96)),  # Rachel Michetti, CC0
    "chelsea": ("a small brass bell", (0.02, 0.70, 0.24, 0.98)),  # Stefan van der Walt, CC0
}
"""scikit-image's photographs: what to paint, and the ellipse in which, as left, top, right and bottom in shares."""


class ProbesError(Exception):
    """A folder holds no probes; the text says what is missing."""


@dataclass(frozen=True)
class Probe:
    """One edit."""

    name: str
    image: bytes
    """A file."""
    mask: bytes
    """A PNG, white where to edit."""
    box: NDArray[np.bool_]
    """(height, width) of the image: the mask's bounding box."""
    prompt: str
    seed: int
    """Another one for each probe of a set."""


def built_in(card: ModelCard) -> list[Probe]:
    """Probes that a model can make something of; equal at every call."""
    return scenes() if card.native_size <= SMALL else photographs()


def scenes() -> list[Probe]:
    """Scenes to which a thing is added; each begins its name with its seed."""
    return [replace(probe, seed=int(probe.name.partition("-")[0])) for probe in read_folder(SCENES)]


def photographs() -> list[Probe]:
    """Photographs in which a thing is to be painted that any model of photographs knows."""
    found: list[Probe] = []
    for name, (prompt, place) in PHOTOGRAPHS.items():
        picture = Image.fromarray(getattr(data, name)())
        mask = Image.new("L", picture.size, 0)
        sides = (*picture.size, *picture.size)
        ImageDraw.Draw(mask).ellipse([part * side for part, side in zip(place, sides, strict=True)], fill=255)
        found.append(_probe(name, png(picture), np.asarray(mask) >= WHITE, prompt, len(found)))
    return found


def read_folder(folder: Path) -> list[Probe]:
    """The probes in a folder, by name: pictures, each with its mask ``NAME-mask.png`` and its prompt ``NAME.txt``.

    Raises:
        ProbesError: there is none, or one is not whole, or is too large for a message.
    """
    pictures = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.endswith(MASK_SUFFIX)
    )
    if not pictures:
        raise ProbesError(f"{folder} holds no picture ({', '.join(SUFFIXES)}).")
    return [_read(path, seed) for seed, path in enumerate(pictures)]


def _read(path: Path, seed: int) -> Probe:
    mask, prompt = (path.with_name(path.stem + suffix) for suffix in (MASK_SUFFIX, PROMPT_SUFFIX))
    try:
        image, text = path.read_bytes(), prompt.read_text(encoding="utf-8").strip()
        with Image.open(mask) as opened:
            marked = np.asarray(opened.convert("L")) >= WHITE
        size = upright_size(image)
    except (OSError, ValueError) as error:
        raise ProbesError(f"{path} is no probe: {error}.") from error
    if marked.shape != size[::-1] or not marked.any():
        raise ProbesError(
            f"{mask}: received {marked.shape[1]}x{marked.shape[0]} pixels, {int(marked.sum())} of them white; "
            f"accepted {size[0]}x{size[1]} as {path.name} has, some of them white."
        )
    if not text:
        raise ProbesError(f"{prompt} is empty; it holds the prompt.")
    probe = _probe(path.stem, image, marked, text, seed)
    if len(probe.image) + len(probe.mask) > INLINE_BYTES:
        raise ProbesError(f"{path} and its mask: received above {INLINE_BYTES} bytes together.")
    return probe


def _probe(name: str, image: bytes, mask: NDArray[np.bool_], prompt: str, seed: int) -> Probe:
    return Probe(
        name, image, png(Image.fromarray(mask.astype(np.uint8) * np.uint8(255))), box_of(mask), prompt, seed
    )


def box_of(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(height, width): the bounding box of a mask that marks something."""
    box = np.zeros_like(mask)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
    return box
