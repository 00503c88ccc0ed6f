"""Sizes: what the model computes, and what the caller gets. All in pixels."""

from __future__ import annotations

from math import isqrt
from typing import Final, NamedTuple

from giornata.errors import SizeMismatch, TooManyPixels

ASPECT_TOLERANCE: Final = 0.02
"""Two sizes have the same aspect ratio when the ratios differ by at most this fraction."""


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


def same_aspect(one: Size, other: Size) -> bool:
    """Whether the aspect ratios differ by at most :data:`ASPECT_TOLERANCE`; symmetric in its arguments."""
    a, b = one.width * other.height, other.width * one.height
    return max(a, b) <= (1 + ASPECT_TOLERANCE) * min(a, b)


def model_size(picture: Size, budget_pixels: int, multiple: int) -> Size:
    """Size of the picture that enters the autoencoder.

    Scaled down to `budget_pixels` where the picture is larger, each side then cut to a multiple. Never
    scaled up, except that no side is below one multiple. The aspect ratio may change by less than one
    multiple a side; the painted picture is resized back by the same factors, so that nothing is distorted in
    the output.

    Args:
        picture: the upright original.
        budget_pixels: most pixels the model computes, at least ``multiple ** 2``.
        multiple: pixels of one token's side (16 for Flux).
    """
    width, height = picture
    if picture.pixels > budget_pixels:
        # floor(width * sqrt(budget / (width * height))) without a rounding error
        width, height = isqrt(budget_pixels * width // height), isqrt(budget_pixels * height // width)
    width, height = (max(multiple, side // multiple * multiple) for side in (width, height))
    if width * height > budget_pixels:  # a side was raised to one multiple
        longest = max(multiple, budget_pixels // multiple // multiple * multiple)
        width, height = min(width, longest), min(height, longest)
    return Size(width, height)


def output_size(picture: Size, requested: Size | None, max_pixels: int) -> Size:
    """Size of the answer: the picture's own, or the requested one where its aspect ratio is the picture's.

    Raises:
        SizeMismatch: another aspect ratio; names the nearest sizes that fit.
        TooManyPixels: more than `max_pixels`.
    """
    if requested is None:
        return picture
    if not same_aspect(requested, picture):
        raise SizeMismatch(
            f"The picture is {picture} and the output is to have the same aspect ratio.",
            field="size",
            received=requested,
            accepted=f"auto, {' or '.join(_nearest(picture, requested))}",
        )
    if requested.pixels > max_pixels:
        raise TooManyPixels(
            "The requested output has more pixels than this server makes.",
            field="size",
            received=f"{requested}, that is {requested.pixels} pixels",
            accepted=f"at most {max_pixels} pixels",
        )
    return requested


def _nearest(picture: Size, requested: Size) -> list[str]:
    by_width = Size(requested.width, max(1, round(requested.width * picture.height / picture.width)))
    by_height = Size(max(1, round(requested.height * picture.width / picture.height)), requested.height)
    return [str(size) for size in (by_width, by_height) if same_aspect(size, picture)] or [str(picture)]
