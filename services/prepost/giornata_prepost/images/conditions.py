"""References and control images of a job: decoded, sized and annotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import pi, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy
import skimage
from PIL import Image
from safetensors.numpy import save

from giornata.families import Family
from giornata.wire.adapters import Annotator, ControlUse, control_field, control_name
from giornata.wire.errors import InvalidField, SizeMismatch
from giornata.wire.models import ModelCard
from giornata.wire.requests import REFERENCE, named_references
from giornata_prepost.images.masks import resize
from giornata_prepost.images.pictures import (
    Box,
    Pixels,
    Size,
    decode,
    flatten,
    model_size,
    of_area,
    same_aspect,
)

# References of a request: decoded, and sized as the model's pipeline in diffusers sizes them.


MAX_PIXELS: Final = 1024**2
"""Pixels of a reference that enters an autoencoder; larger pictures are scaled down."""
KONTEXT_SIDES: Final = (
    672, 688, 720, 752, 800, 832, 880, 944, 1024, 1104,
    1184, 1248, 1328, 1392, 1456, 1504, 1568,
)  # fmt: skip
"""Widths of the sizes on which Flux Kontext was trained, in ascending order; the heights are the same, descending."""


class ReferenceCrop(NamedTuple):
    """A way from a picture to a reference: it is resized, and a part of that is cut out."""

    scaled: Size
    cut_out: Box


class PreparedReferences(NamedTuple):
    """The references of a job, ready for the autoencoder."""

    grids: tuple[tuple[int, int], ...] = ()
    """Height and width of each in tokens."""
    packed: bytes = b""
    """safetensors, see :attr:`giornata.wire.jobs.Inspection.references`; nothing without any."""
    pictures: tuple[Pixels, ...] = ()


NO_REFERENCES: Final = PreparedReferences()


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
    return PreparedReferences(grids, save(named_references(pictures)), pictures)


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


# Control images of a job: decoded, cut and sized as the picture of the model is, and annotated.


CANNY_LOW: Final = 100
CANNY_HIGH: Final = 200
"""Thresholds of the Sobel gradient of 8-bit greys, which are not smoothed: as the examples of diffusers call
`cv2.Canny`, and as ControlNets are trained. Gradients are measured by their length, there by the sum of their parts."""
SOFT_SIGMA: Final = 1.5
"""Width of a soft edge, in pixels."""
SOFT_GAIN: Final = 2.0
"""An edge between colours that differ by 1 / gain of the whole range is white."""
TILE_FACTOR: Final = 8
"""How many times smaller the picture gets, as the preprocessor of ControlNet 1.1's tile model does."""


def canny(picture: Pixels) -> Pixels:
    """White lines on black (Canny, PAMI 1986), two pixels wide at most; none along the picture's border."""
    grey = np.asarray(Image.fromarray(picture).convert("L"), np.float32) / np.float32(255)
    edges = skimage.feature.canny(
        grey, sigma=0, low_threshold=CANNY_LOW / 255, high_threshold=CANNY_HIGH / 255
    )
    return _grey(np.asarray(edges) * np.uint8(255))


def soft_edge(picture: Pixels) -> Pixels:
    """Soft white edges on black: the largest of the three colours' gradients, each smoothed by a Gaussian.

    This is no learnt detector as HED or PidiNet: texture shows as outlines do. A step by a height h shows as a Gaussian
    of that sigma and of the height :data:`SOFT_GAIN` * h, cut at white.
    """
    colours = picture.astype(np.float32)
    gradients = [
        scipy.ndimage.gaussian_gradient_magnitude(colours[..., colour], SOFT_SIGMA, mode="nearest")
        for colour in range(3)
    ]
    height = np.max(gradients, axis=0) * np.float32(SOFT_GAIN * SOFT_SIGMA * sqrt(2 * pi))
    return _grey(np.rint(np.minimum(height, 255)).astype(np.uint8))


def tile(picture: Pixels) -> Pixels:
    """The picture without its details: averaged over squares of :data:`TILE_FACTOR` pixels, and scaled up smoothly."""
    image = Image.fromarray(picture)
    return np.asarray(image.reduce(TILE_FACTOR).resize(image.size, Image.Resampling.BICUBIC))


ANNOTATORS: Final[Mapping[Annotator, Callable[[Pixels], Pixels]]] = {
    Annotator.CANNY: canny,
    Annotator.SOFT_EDGE: soft_edge,
    Annotator.TILE: tile,
}


def _grey(values: npt.NDArray[np.uint8]) -> Pixels:
    """(height, width) as a picture."""
    return np.repeat(values[..., None], 3, axis=2)


FIELD: Final = "controlnets"


@dataclass(frozen=True)
class ModelCrop:
    """The part of a picture that the model sees, and its size there."""

    picture: Size
    """The upright original's; of a generation, the model's."""
    crop: Box | None
    """The part of it, with `padding_mask_crop`; None for all of it."""
    model: Size
    pixels: Pixels | None = None
    """The model's picture; None of a generation."""


def control_images(
    files: Sequence[bytes], uses: Sequence[ControlUse], view: ModelCrop, max_pixels: int
) -> bytes:
    """The control images of a job, see :attr:`giornata.wire.jobs.Inspection.controls`.

    `files` are the job's control images as they were sent. Each is decoded once, and annotated once.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.pictures.decode`, naming the field.
        SizeMismatch: a control image has another aspect ratio than the picture.
        InvalidField: a ControlNet names an image that is not there.
    """

    @cache
    def decoded(index: int) -> Pixels:
        if index >= len(files):
            raise InvalidField(
                "A ControlNet names a control image that did not come with the request.",
                field=FIELD,
                received=f"image {index}",
                accepted=f"{len(files)} control images, counted from 0",
            )
        return decode(files[index], max_pixels, control_field(index)).pixels

    @cache
    def made(index: int | None, annotator: Annotator | None) -> Pixels:
        if index is None:
            shown = _own(view)
        else:
            # a file that is a control image already loses its transparency, as diffusers converts it to RGB
            shown = crop_control(
                decoded(index)[..., :3] if annotator is None else flatten(decoded(index)), view, index
            )
        return shown if annotator is None else ANNOTATORS[annotator](shown)

    return save({control_name(i): made(use.image, use.annotator) for i, use in enumerate(uses)})


def crop_control(pixels: Pixels, view: ModelCrop, index: int) -> Pixels:
    """What the model sees of control image `index`, (height, width, 3): the same part as of the picture, resized alike.

    A control image of another size shows the picture scaled; its part begins and ends at the nearest pixels.
    """
    size = Size.of(pixels)
    if not same_aspect(size, view.picture):
        raise SizeMismatch(
            "A control image must have the picture's aspect ratio.",
            field=control_field(index),
            received=size,
            accepted=f"{view.picture}, or a size of the same aspect ratio",
        )
    part = scale_part(view.crop or Box(0, 0, *view.picture), view.picture, size)
    return np.ascontiguousarray(resize(pixels[part.window], view.model))


def scale_part(box: Box, picture: Size, other: Size) -> Box:
    """A part of `picture` in a scaled copy of it of the size `other`: at least one pixel, of the nearest edges."""
    left, right = (_edge(edge, picture.width, other.width) for edge in (box.left, box.left + box.width))
    top, bottom = (_edge(edge, picture.height, other.height) for edge in (box.top, box.top + box.height))
    left, top = min(left, other.width - 1), min(top, other.height - 1)
    return Box(left, top, max(1, right - left), max(1, bottom - top))


def _edge(edge: int, length: int, other: int) -> int:
    """The nearest edge between pixels, halves up."""
    return (2 * edge * other + length) // (2 * length)


def _own(view: ModelCrop) -> Pixels:
    if view.pixels is None:
        raise InvalidField(
            "A ControlNet is to see the picture that is edited, and a generation has none.",
            field=FIELD,
            received="a ControlNet without image",
            accepted=f"the index of a control image, 0 for {control_field(0)}",
        )
    return view.pixels
