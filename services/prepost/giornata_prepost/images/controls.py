"""Control images of a job: decoded, cut and sized as the picture of the model is, and annotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from safetensors.numpy import save

from giornata.wire.adapters import Annotator, ControlUse, control_field, control_name
from giornata.wire.errors import InvalidField, SizeMismatch
from giornata_prepost.images.annotators import ANNOTATORS
from giornata_prepost.images.geometry import Box, Size, same_aspect
from giornata_prepost.images.paste import resize
from giornata_prepost.images.pictures import Pixels, decode, flatten

FIELD: Final = "controlnets"


@dataclass(frozen=True)
class View:
    """What of a picture the model sees, and how large."""

    picture: Size
    """The upright original's; of a generation, the model's."""
    crop: Box | None
    """The part of it, with `padding_mask_crop`; None for all of it."""
    model: Size
    pixels: Pixels | None = None
    """The model's picture; None of a generation."""


def control_images(
    files: Sequence[bytes], uses: Sequence[ControlUse], view: View, max_pixels: int
) -> bytes | None:
    """The control images of a job, see :attr:`giornata.wire.jobs.Inspection.controls`; None without any.

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
            shown = seen(
                decoded(index)[..., :3] if annotator is None else flatten(decoded(index)), view, index
            )
        return shown if annotator is None else ANNOTATORS[annotator](shown)

    named = {control_name(i): made(use.image, use.annotator) for i, use in enumerate(uses)}
    return save(named) if named else None


def seen(pixels: Pixels, view: View, index: int) -> Pixels:
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
    part = scaled(view.crop or Box(0, 0, *view.picture), view.picture, size)
    return np.ascontiguousarray(resize(pixels[part.window], view.model))


def scaled(box: Box, picture: Size, other: Size) -> Box:
    """A part of `picture` in a scaled copy of it of the size `other`: at least one pixel, of the nearest edges."""
    left, right = (_edge(edge, picture.width, other.width) for edge in (box.left, box.left + box.width))
    top, bottom = (_edge(edge, picture.height, other.height) for edge in (box.top, box.top + box.height))
    left, top = min(left, other.width - 1), min(top, other.height - 1)
    return Box(left, top, max(1, right - left), max(1, bottom - top))


def _edge(edge: int, length: int, other: int) -> int:
    """The nearest edge between pixels, halves up."""
    return (2 * edge * other + length) // (2 * length)


def _own(view: View) -> Pixels:
    if view.pixels is None:
        raise InvalidField(
            "A ControlNet is to see the picture that is edited, and a generation has none.",
            field=FIELD,
            received="a ControlNet without image",
            accepted=f"the index of a control image, 0 for {control_field(0)}",
        )
    return view.pixels
