"""Sizes and boxes of the model's picture and of the output, in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from giornata.wire.errors import SizeMismatch, TooManyPixels

ASPECT_TOLERANCE: Final = 0.02
"""Two sizes have the same aspect ratio when the ratios differ by at most this fraction."""


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, pixels: npt.NDArray[np.generic]) -> Self:
        """The size of an array (height, width, ...)."""
        return cls(pixels.shape[1], pixels.shape[0])

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    width: int
    height: int

    @property
    def size(self) -> Size:
        """Width and height."""
        return Size(self.width, self.height)

    @property
    def window(self) -> tuple[slice, slice]:
        """It indexes an array (height, width, ...)."""
        return slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)


def same_aspect(one: Size, other: Size) -> bool:
    """Return whether the aspect ratios differ by at most :data:`ASPECT_TOLERANCE`; symmetric in its arguments."""
    a, b = one.width * other.height, other.width * one.height
    return max(a, b) <= (1 + ASPECT_TOLERANCE) * min(a, b)


def model_size(picture: Size, budget_pixels: int, multiple: int) -> Size:
    """Size of the picture that enters the autoencoder; `multiple` is the pixels of one token's side (16 for Flux).

    A larger picture is scaled down to `budget_pixels`, which is at least ``multiple ** 2``. Each side is then cut to a
    multiple. Nothing is scaled up, except that no side is below one multiple. The aspect ratio may change by less than
    one multiple a side; the painted picture is resized back by the same factors, so the output is not distorted.
    """
    scaled = of_area(picture, budget_pixels) if picture.pixels > budget_pixels else picture
    return _in_multiples(scaled, budget_pixels, multiple)


def generated_size(requested: tuple[int, int] | None, native: int, budget_pixels: int, multiple: int) -> Size:
    """Size of the pictures of a generation: the requested one, or the model's native square as far as it is allowed.

    Raises:
        TooManyPixels: the requested one has more than `budget_pixels`.
    """
    if requested is None:
        return model_size(Size(native, native), budget_pixels, multiple)
    size = Size(*requested)
    if size.pixels > budget_pixels:
        raise TooManyPixels(
            "The requested picture has more pixels than this server computes.",
            field="size",
            received=f"{size}, that is {size.pixels} pixels",
            accepted=f"at most {budget_pixels} pixels",
        )
    return size


def crop_box(marked: Box, picture: Size) -> Box:
    """The box that `padding_mask_crop` cuts out: the mask's with its padding, made square where there is room.

    The shorter side grows on both ends, and inward only where the picture ends; this is
    `VaeImageProcessor.get_crop_region` of diffusers for a square. Every checkpoint was trained on squares, and what a
    square adds around a long mask is context.
    """
    side = max(marked.size)
    left, width = _grown(marked.left, marked.width, side, picture.width)
    top, height = _grown(marked.top, marked.height, side, picture.height)
    return Box(left, top, width, height)


def crop_size(cut_out: Size, native: int, budget_pixels: int, multiple: int) -> Size:
    """Size at which the model computes what :func:`crop_box` cut out: up to `native` squared pixels, scaled up or down.

    A square box becomes the native square. Where the picture had no room for a square, the box's own shape is kept,
    within less than one multiple a side, and not padded to a square as diffusers does (`resize_mode="fill"`): smeared
    borders would be computed and thrown away, and the model would see them.
    """
    pixels = max(min(native**2, budget_pixels), multiple**2)
    return _in_multiples(of_area(cut_out, pixels), pixels, multiple)


def crops_alike(
    marked: Sequence[Box], picture: Size, native: int, budget_pixels: int, multiple: int
) -> tuple[tuple[Box, ...], Size]:
    """What :func:`crop_box` cuts out of each marked box, and the one size at which the model computes all of them.

    Where these boxes would have several sizes, since the picture has no room for some square, each marked box is grown
    to the picture's own shape instead, which always has room.
    """
    crops = tuple(crop_box(box, picture) for box in marked)
    sizes = {crop_size(crop.size, native, budget_pixels, multiple) for crop in crops}
    if len(sizes) == 1:
        return crops, sizes.pop()
    crops = tuple(_of_shape(box, picture) for box in marked)
    return crops, crop_size(picture, native, budget_pixels, multiple)


def _of_shape(marked: Box, picture: Size) -> Box:
    """The smallest box of the picture's shape around a marked one, inside the picture."""
    larger = max(marked.width * picture.height, marked.height * picture.width)
    left, width = _grown(marked.left, marked.width, -(-larger // picture.height), picture.width)
    top, height = _grown(marked.top, marked.height, -(-larger // picture.width), picture.height)
    return Box(left, top, width, height)


def _grown(start: int, length: int, wanted: int, limit: int) -> tuple[int, int]:
    """Start and length of a span of `wanted` pixels around a span, kept within 0..limit."""
    wanted = min(wanted, limit)
    return min(max(start - (wanted - length) // 2, 0), limit - wanted), wanted


def of_area(shape: Size, pixels: int) -> Size:
    """The size of a shape that has at most `pixels`: floor(width * sqrt(pixels / (width * height))), exactly."""
    width, height = shape
    return Size(isqrt(pixels * width // height), isqrt(pixels * height // width))


def _in_multiples(size: Size, budget_pixels: int, multiple: int) -> Size:
    """Each side cut to a multiple, but to no less than one."""
    width, height = (max(multiple, side // multiple * multiple) for side in size)
    if width * height > budget_pixels:  # a side was raised to one multiple
        longest = max(multiple, budget_pixels // multiple // multiple * multiple)
        width, height = min(width, longest), min(height, longest)
    return Size(width, height)


def output_size(picture: Size, requested: tuple[int, int] | None, max_pixels: int) -> Size:
    """Size of the answer: the picture's own, or the requested one where its aspect ratio is the picture's.

    Raises:
        SizeMismatch: another aspect ratio; names the nearest sizes that fit.
        TooManyPixels: more than `max_pixels`.
    """
    if requested is None:
        return picture
    size = Size(*requested)
    if not same_aspect(size, picture):
        raise SizeMismatch(
            f"The picture is {picture} and the output is to have the same aspect ratio.",
            field="size",
            received=size,
            accepted=f"auto, {' or '.join(_nearest(picture, size))}",
        )
    if size.pixels > max_pixels:
        raise TooManyPixels(
            "The requested output has more pixels than this server makes.",
            field="size",
            received=f"{size}, that is {size.pixels} pixels",
            accepted=f"at most {max_pixels} pixels",
        )
    return size


def _nearest(picture: Size, requested: Size) -> list[str]:
    by_width = Size(requested.width, max(1, round(requested.width * picture.height / picture.width)))
    by_height = Size(max(1, round(requested.height * picture.width / picture.height)), requested.height)
    return [str(size) for size in (by_width, by_height) if same_aspect(size, picture)] or [str(picture)]
