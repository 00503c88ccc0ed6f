"""The first stage: decode, measure, and prepare what the autoencoder sees. Free of torch."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from giornata.wire.models import Family, ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.values import CellMap
from giornata_prepost.geometry import Box, Size, crop_box, crop_size, model_size, output_size
from giornata_prepost.masks import (
    Alpha,
    bounds,
    cells,
    compute_set,
    edited_region,
    effective_alpha,
    model_mask,
)
from giornata_prepost.paste import resize
from giornata_prepost.pictures import Picture, Pixels, decode, flatten


@dataclass(frozen=True)
class PixelLimits:
    """How large pictures may be, in pixels (width times height)."""

    max_pixels: int
    """Of an image, a mask, an output."""
    budget_pixels: int
    """Of the picture that the model computes."""


@dataclass(frozen=True)
class Inspected:
    """Measures of one edit, named as in :class:`giornata.wire.jobs.Inspection`, and the blob to be stored."""

    width: int
    height: int
    has_alpha: bool
    model_width: int
    model_height: int
    output_width: int
    output_height: int
    tokens: int
    compute_tokens: int
    mask_ratio: float
    """compute_tokens / tokens."""
    compute_set: dict[int, CellMap] | None
    pixel_ratio: float
    """Share of the original's pixels with an effective alpha above 0."""
    template_key: str
    crop: Box | None
    """What of the upright original the model's picture shows; None for all of it."""
    prepared: bytes
    """safetensors, uint8, at the model's size: `image` (height, width, 3), `mask` (height, width), 255 = edit."""


def inspect(
    image: bytes, mask: bytes | None, parameters: EditParameters, card: ModelCard, limits: PixelLimits
) -> Inspected:
    """Everything that can be known of an edit before any model runs.

    Args:
        image: the file as it was sent.
        mask: likewise.
        parameters: reads `size`, `mask_mode`, `grow_mask`, `mask_blur`, `padding_mask_crop`, `halo`.
        card: the model that will do it.
        limits: on pixels.

    Raises:
        BadRequest: one of its leaves, see :func:`read_edit` and
            :func:`~giornata_prepost.geometry.output_size`.
    """
    original, alpha = read_edit(image, mask, parameters, limits)
    return measured(original, alpha, parameters, card, limits)


def inspect_template(
    image: bytes, parameters: EditParameters, card: ModelCard, limits: PixelLimits
) -> Inspected:
    """Everything that can be known of a template: the picture as its edits see it, with an empty mask.

    Args:
        image: the file as it was sent.
        parameters: reads `size`.
        card: the model that will record it.
        limits: on pixels.

    Raises:
        BadRequest: one of its leaves, see :func:`~giornata_prepost.pictures.decode` and
            :func:`~giornata_prepost.geometry.output_size`.
    """
    original = decode(image, limits.max_pixels, "image")
    nothing = np.zeros(original.pixels.shape[:2], np.float32)
    return measured(original, nothing, parameters, card, limits)


def measured(
    original: Picture, alpha: Alpha, parameters: EditParameters, card: ModelCard, limits: PixelLimits
) -> Inspected:
    """Measures of an edit, or of a template, whose alpha is 0 everywhere.

    Args:
        original: upright.
        alpha: (height, width), the effective alpha.
        parameters: reads `size` and, where the alpha is above 0 somewhere, `padding_mask_crop` and `halo`.
        card: the model that will do it.
        limits: on pixels.

    Raises:
        SizeMismatch, TooManyPixels: the requested output.
    """
    size = Size(original.width, original.height)
    output = requested_size(size, parameters, limits)
    crop = cut_out(alpha, parameters.padding_mask_crop)
    if crop is None:
        model = model_size(size, limits.budget_pixels, card.pixel_multiple)
    else:
        model = crop_size(crop.size, card.native_size, limits.budget_pixels, card.pixel_multiple)
    window = (crop or Box(0, 0, *size)).window
    seen = template(Picture(original.pixels[window]), model)
    edited = model_mask(alpha[window], model, mask_grain(card))
    tokens = model.pixels // card.pixel_multiple**2
    touched = cells(edited, card.pixel_multiple)
    compute_tokens = int(np.count_nonzero(touched))
    computed = compute_set(touched, parameters.halo)
    return Inspected(
        width=size.width,
        height=size.height,
        has_alpha=original.has_alpha,
        model_width=model.width,
        model_height=model.height,
        output_width=output.width,
        output_height=output.height,
        tokens=tokens,
        compute_tokens=compute_tokens,
        mask_ratio=compute_tokens / tokens,
        compute_set=None if computed is None else {1: computed},
        pixel_ratio=float(np.count_nonzero(alpha) / alpha.size),
        template_key=template_key(seen, card),
        crop=crop,
        prepared=save({"image": np.ascontiguousarray(seen), "mask": edited.astype(np.uint8) * np.uint8(255)}),
    )


def read_edit(
    image: bytes, mask: bytes | None, parameters: EditParameters, limits: PixelLimits
) -> tuple[Picture, Alpha]:
    """The upright original and the effective alpha at its size.

    Raises:
        BadRequest: one of the leaves that :func:`~giornata_prepost.pictures.decode` and
            :func:`~giornata_prepost.masks.edited_region` name.
    """
    original = decode(image, limits.max_pixels, "image")
    marks = None if mask is None else decode(mask, limits.max_pixels, "mask").pixels
    region = edited_region(original.pixels, marks, parameters.mask_mode)
    return original, effective_alpha(region, parameters.grow_mask, parameters.mask_blur)


def cut_out(alpha: Alpha, padding: int | None) -> Box | None:
    """What `padding_mask_crop` leaves of the picture; None, all of it, where it is not asked for.

    Nothing outside has an alpha above 0, so that the paste keeps to it: the box holds the mask after grow and blur.

    Args:
        alpha: (height, width), the effective alpha, somewhere above 0.
        padding: pixels of the image around the mask's box.
    """
    if padding is None:
        return None
    return crop_box(bounds(alpha > 0, padding), Size(alpha.shape[1], alpha.shape[0]))


def requested_size(picture: Size, parameters: EditParameters, limits: PixelLimits) -> Size:
    """The size of the answer, from the request's `size`."""
    requested = parameters.output_size
    return output_size(picture, None if requested is None else Size(*requested), limits.max_pixels)


def template(original: Picture, size: Size) -> Pixels:
    """What enters the autoencoder: (size.height, size.width, 3) uint8 RGB, transparency seen on white."""
    return resize(flatten(original.pixels), size)


def mask_grain(card: ModelCard) -> int:
    """Cells in which the family tells edited from kept, in model pixels a side; see :func:`model_mask`."""
    return card.vae_scale_factor if card.family is Family.FLUX_INPAINT else 1


def template_key(pixels: Pixels, card: ModelCard) -> str:
    """sha-256 (hex) of the model's digest and family and of the pixels that enter the autoencoder.

    Equal for every edit of one template, whatever mask, prompt, seed and output it has.
    """
    key = hashlib.sha256(b"giornata template 1\0")
    key.update(f"{card.digest}\0{card.family}\0".encode())
    key.update(struct.pack("<II", pixels.shape[1], pixels.shape[0]))
    key.update(np.ascontiguousarray(pixels).data)
    return key.hexdigest()
