"""References of a request: decoded, and sized as the model's pipeline in diffusers sizes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
from safetensors.numpy import save

from giornata.families import Family
from giornata.wire.models import ModelCard
from giornata.wire.references import REFERENCE, named_references
from giornata_prepost.images.geometry import Box, Size, model_size, of_area
from giornata_prepost.images.paste import resize
from giornata_prepost.images.pictures import Pixels, decode, flatten

MAX_PIXELS: Final = 1024**2
"""Pixels of a reference that enters an autoencoder; larger pictures are scaled down."""
KONTEXT_SIDES: Final = (
    672,
    688,
    720,
    752,
    800,
    832,
    880,
    944,
    1024,
    1104,
    1184,
    1248,
    1328,
    1392,
    1456,
    1504,
    1568,
)
"""Widths of the sizes on which Flux Kontext was trained, in ascending order; the heights are the same, descending."""


class ReferenceCrop(NamedTuple):
    """How a picture becomes a reference: it is resized, and a part of that is cut out."""

    scaled: Size
    cut_out: Box


class PreparedReferences(NamedTuple):
    """The references of a job, ready for the autoencoder."""

    grids: tuple[tuple[int, int], ...]
    """Height and width of each in tokens."""
    packed: bytes | None
    """safetensors, see :attr:`giornata.wire.jobs.Inspection.references`; None without any."""
    pictures: tuple[Pixels, ...]


Sizing = Callable[[Size, int, int], ReferenceCrop]
"""Places a picture of a size, given the most pixels and the pixels of a token's side."""


def prepare(
    files: Sequence[bytes], card: ModelCard, max_pixels: int, budget_pixels: int
) -> PreparedReferences:
    """The references in `files`, as `card` looks at them.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.pictures.decode`; the error names the field.
    """
    pictures = tuple(
        _placed(decode(file, max_pixels, REFERENCE).pixels, card, budget_pixels) for file in files
    )
    grids = tuple(
        (side.height // card.pixel_multiple, side.width // card.pixel_multiple)
        for side in map(Size.of, pictures)
    )
    return PreparedReferences(grids, save(named_references(pictures)) if pictures else None, pictures)


def cropped(picture: Size, most_pixels: int, multiple: int) -> ReferenceCrop:
    """As `Flux2KleinInpaintPipeline`: scaled down to so many pixels, and cut to the multiple around its middle."""
    most = min(MAX_PIXELS, most_pixels)
    scaled = of_area(picture, most) if picture.pixels > most else picture
    if min(scaled) < multiple:  # nothing can be cut out of a strip
        return _whole(model_size(picture, most, multiple))
    width, height = (side // multiple * multiple for side in scaled)
    return ReferenceCrop(
        scaled, Box((scaled.width - width) // 2, (scaled.height - height) // 2, width, height)
    )


def of_kontext(picture: Size, most_pixels: int, multiple: int) -> ReferenceCrop:
    """As `FluxKontextPipeline`: the size, of those it was trained on, whose aspect ratio is the nearest."""
    sizes = map(Size, KONTEXT_SIDES, reversed(KONTEXT_SIDES))
    aspect = picture.width / picture.height
    nearest = min(sizes, key=lambda size: (abs(aspect - size.width / size.height), size))
    return _whole(model_size(nearest, most_pixels, multiple))


def of_edit_plus(picture: Size, most_pixels: int, multiple: int) -> ReferenceCrop:  # noqa: ARG001 - sides have 32 pixels
    """As `QwenImageEditPlusPipeline`: scaled up or down to about so many pixels, sides rounded to multiples of 32."""
    area, aspect = min(MAX_PIXELS, most_pixels), picture.width / picture.height
    width = sqrt(area * aspect)
    longest = max(32, area // 32 // 32 * 32)  # of a strip, which diffusers would round to nothing
    return _whole(Size(*(min(max(32, round(side / 32) * 32), longest) for side in (width, width / aspect))))


SIZINGS: Final[Mapping[str, Sizing]] = {
    Family.FLUX_KONTEXT: of_kontext,
    Family.QWEN_IMAGE_EDIT_PLUS: of_edit_plus,
}
"""By family; others are :func:`cropped`."""


def _placed(pixels: Pixels, card: ModelCard, budget_pixels: int) -> Pixels:
    sizing = SIZINGS.get(card.family, cropped)
    placing = sizing(Size.of(pixels), budget_pixels, card.pixel_multiple)
    return np.ascontiguousarray(resize(flatten(pixels), placing.scaled)[placing.cut_out.window])


def _whole(size: Size) -> ReferenceCrop:
    return ReferenceCrop(size, Box(0, 0, *size))
