"""The two stages of image work: inspection, before any model runs, and finishing, after the last one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from giornata.wire.adapters import ControlUse
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import Inspection
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode
from giornata_prepost.images import masks
from giornata_prepost.images.conditions import NO_REFERENCES, ModelCrop, control_images, prepare
from giornata_prepost.images.masks import Alpha, paste, resize
from giornata_prepost.images.pictures import (
    Box,
    DecodedPicture,
    Pixels,
    Size,
    crop_box,
    crop_size,
    crops_alike,
    decode,
    encode_as_asked,
    flatten,
    generated_size,
    model_size,
    output_size,
)


@dataclass(frozen=True)
class PixelLimits:
    """The largest pictures, in pixels (width times height)."""

    max_pixels: int
    """Limit of an image, a mask and an output."""
    budget_pixels: int
    """Limit of the picture that the model computes."""


class InspectedEdit(NamedTuple):
    """The measures of an edit, and the blobs to be stored under the names of the inspection's fields."""

    measures: Inspection
    """Without claim checks."""
    prepared: bytes
    alpha: bytes
    """The effective alpha, by :func:`giornata_prepost.images.masks.pack_alpha`; of regions, safetensors of each."""
    references: bytes | None
    controls: bytes | None = None

    @property
    def blobs(self) -> dict[str, bytes]:
        """Those that there are, by name."""
        return {name: data for name, data in self._asdict().items() if isinstance(data, bytes)}


class ControlFiles(NamedTuple):
    """The files of a job's control images, and the ControlNets that see them."""

    files: Sequence[bytes] = ()
    uses: Sequence[ControlUse] = ()


NO_CONTROLS: Final = ControlFiles()


def inspect(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    mask: bytes | None,
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    references: Sequence[bytes] = (),
    controls: ControlFiles = NO_CONTROLS,
) -> InspectedEdit:
    """Measure an edit that `card` will compute; `image`, `mask` and `references` are files as they were sent.

    Raises:
        BadRequest: one of the leaves that :func:`~giornata_prepost.images.pictures.decode`,
            :func:`~giornata_prepost.images.masks.edited_region`,
            :func:`~giornata_prepost.images.pictures.output_size` and
            :func:`~giornata_prepost.images.conditions.control_images` name.
    """
    original, alpha = read_edit(image, mask, parameters, limits)
    return _inspected(original, alpha, parameters, card, limits, references, controls)


def inspect_template(
    image: bytes, parameters: EditParameters, card: ModelCard, limits: PixelLimits
) -> InspectedEdit:
    """Measure a template: the picture as its edits see it, with an empty mask. Of `parameters`, `size` is read.

    Raises:
        BadRequest: as :func:`inspect`.
    """
    original = decode(image, limits.max_pixels)
    nothing = np.zeros(original.pixels.shape[:2], np.float32)
    return _inspected(original, nothing, parameters, card, limits)


def finish(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    alpha: bytes,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Pixels,
    crop: tuple[int, int, int, int] | None = None,
) -> bytes:
    """The finished file: `painted`, the decoded picture at the model's size, pasted into the original file.

    `alpha` and `crop` are what the inspection found, with the same limits.
    """
    original = decode(image, limits.max_pixels)
    size = output_size(Size.of(original.pixels), parameters.output_size, limits.max_pixels)
    pixels = paste(original.pixels, masks.unpack_alpha(alpha), painted, size, crop and Box(*crop))
    return encode_as_asked(DecodedPicture(pixels, original.icc_profile), parameters)


def read_edit(
    image: bytes, mask: bytes | None, parameters: EditParameters, limits: PixelLimits
) -> tuple[DecodedPicture, Alpha]:
    """The upright original and the effective alpha at its size; raises as :func:`inspect`."""
    original = decode(image, limits.max_pixels)
    marks = None if mask is None else decode(mask, limits.max_pixels, "mask").pixels
    region = masks.edited_region(original.pixels, marks, parameters.mask_mode)
    return original, masks.effective_alpha(region, parameters.grow_mask, parameters.mask_blur)


def visible_part(
    alpha: Alpha, padding: int | None, card: ModelCard, budget_pixels: int
) -> tuple[Box | None, Size]:
    """The part of the picture that `card` computes, None for all of it, and the size at which it does.

    With the `padding` of `padding_mask_crop`, the part is a box around the mask after grow and blur: outside of it the
    alpha, which is somewhere above 0, is 0.
    """
    if padding is None:
        return None, model_size(Size.of(alpha), budget_pixels, card.pixel_multiple)
    crop = crop_box(masks.bounds(alpha > 0, padding), Size.of(alpha))
    return crop, crop_size(crop.size, card.native_size, budget_pixels, card.pixel_multiple)


def _inspected(  # noqa: PLR0917 - one of two callers has no mask
    original: DecodedPicture,
    alpha: Alpha,
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    references: Sequence[bytes] = (),
    controls: ControlFiles = NO_CONTROLS,
) -> InspectedEdit:
    """The inspection of an edit, or of a template, whose alpha is 0 everywhere."""
    size = Size.of(original.pixels)
    beside = NO_REFERENCES
    if references:
        beside = prepare(references, card, limits.max_pixels, limits.budget_pixels)
    crop, model = visible_part(alpha, parameters.padding_mask_crop, card, limits.budget_pixels)
    seen, edited = _model_pixels(original, alpha, crop or Box(0, 0, *size), model, card)
    computed = masks.compute_set(edited, parameters.halo, card.pixel_multiple)
    measures = _edit_measures(
        original,
        model,
        parameters,
        card,
        limits,
        beside.grids,
        compute_tokens=_touched_tokens(edited, card),
        compute_set=None if computed is None else {1: computed},
        template_key=_template_key(seen, card, beside.pictures),
        crop=crop,
    )
    view = ModelCrop(size, crop, model, seen)
    return InspectedEdit(
        measures,
        prepared=save({"image": seen, "mask": edited.astype(np.uint8) * np.uint8(255)}),
        alpha=masks.pack_alpha(alpha),
        references=beside.packed or None,
        controls=control_images(*controls, view, limits.max_pixels) if controls.uses else None,
    )


def _model_pixels(
    original: DecodedPicture, alpha: Alpha, crop: Box, model: Size, card: ModelCard
) -> tuple[Pixels, masks.Region]:
    """The part `crop` of a picture, and the mask, as the model sees them."""
    seen = np.ascontiguousarray(resize(flatten(original.pixels[crop.window]), model))
    return seen, masks.model_mask(alpha[crop.window], model, card.mask_grain)


def _touched_tokens(edited: masks.Region, card: ModelCard) -> int:
    return int(np.count_nonzero(masks.pool_cells(edited, card.pixel_multiple)))


def _edit_measures(  # noqa: PLR0917 - the sizes follow from all of it
    original: DecodedPicture,
    model: Size,
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    grids: tuple[tuple[int, int], ...],
    **found: Any,
) -> Inspection:
    """The measures of an edit of `original` that is computed at the size `model`.

    Raises as :func:`output_size`, and InvalidField where an opaque picture is to have a transparent background.
    """
    size, has_alpha = Size.of(original.pixels), original.pixels.shape[2] == 4
    if parameters.background == "transparent" and not has_alpha:
        raise InvalidField(
            "An edit keeps the transparency of its image, and this image has none.",
            field="background",
            received=parameters.background,
            accepted="auto or opaque, or an image with an alpha channel",
        )
    output = output_size(size, parameters.output_size, limits.max_pixels)
    has_alpha = has_alpha and parameters.background != "opaque"
    return _measures(size, model, output, card, grids, has_alpha=has_alpha, **found)


def _measures(
    picture: Size,
    model: Size,
    output: Size,
    card: ModelCard,
    grids: tuple[tuple[int, int], ...],
    *,
    compute_tokens: int | None = None,
    generated: bool = False,
    **found: Any,
) -> Inspection:
    """An inspection; `compute_tokens` are all by default. `grids` are those of the request's references in tokens."""
    tokens, crops = model.pixels // card.pixel_multiple**2, len(found.get("crops", ())) or 1
    computed = tokens if compute_tokens is None else compute_tokens
    return Inspection(
        width=picture.width,
        height=picture.height,
        model_width=model.width,
        model_height=model.height,
        output_width=output.width,
        output_height=output.height,
        tokens=tokens,
        companion_tokens=card.companion_tokens(
            tokens, [rows * columns for rows, columns in grids], generated=generated
        ),
        reference_grids=grids,
        compute_tokens=computed,
        mask_ratio=computed / (tokens * crops),
        **found,
    )


def _template_key(pixels: Pixels, card: ModelCard, references: Sequence[Pixels]) -> str:
    """sha-256 (hex) of the model's digest and family and of the pixels that enter the autoencoder.

    All edits of one picture with the same references have the same key, with any mask, prompt, seed and output.
    """
    key = hashlib.sha256(b"giornata template 1\0")
    key.update(f"{card.digest}\0{card.family}\0".encode())
    for picture in (pixels, *references):
        key.update(struct.pack("<II", picture.shape[1], picture.shape[0]))
        key.update(np.ascontiguousarray(picture).data)
    return key.hexdigest()


# Edits whose regions are painted one by one, each in a crop, and pasted together.


def inspect_regions(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    regions: Sequence[bytes],
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    references: Sequence[bytes] = (),
) -> InspectedEdit:
    """Measure an edit whose `regions`, files of masks, are painted one by one. Nothing of it is reused.

    At most one region's alpha is in memory.

    Raises:
        BadRequest: as :func:`giornata_prepost.images.stages.inspect`.
    """
    original = decode(image, limits.max_pixels)
    beside = NO_REFERENCES
    if references:
        beside = prepare(references, card, limits.max_pixels, limits.budget_pixels)
    packed: list[bytes] = []
    marked: list[Box] = []
    for region in regions:
        marks = decode(region, limits.max_pixels, "mask").pixels
        edited = masks.edited_region(original.pixels, marks, MaskMode.WHITE)
        alpha = masks.effective_alpha(edited, parameters.grow_mask, parameters.mask_blur)
        marked.append(masks.bounds(alpha > 0, parameters.padding_mask_crop or 0))
        packed.append(masks.pack_alpha(alpha))
    crops, model = crops_alike(
        marked, Size.of(original.pixels), card.native_size, limits.budget_pixels, card.pixel_multiple
    )
    prepared: dict[str, npt.NDArray[np.uint8]] = {}
    touched = 0  # tokens
    for index, (crop, alpha) in enumerate(zip(crops, map(masks.unpack_alpha, packed), strict=True)):
        seen, mask = _model_pixels(original, alpha, crop, model, card)
        touched += _touched_tokens(mask, card)
        prepared |= {f"image_{index}": seen, f"mask_{index}": mask.astype(np.uint8) * np.uint8(255)}
    measures = _edit_measures(
        original,
        model,
        parameters,
        card,
        limits,
        beside.grids,
        compute_tokens=touched,
        template_key="",
        crops=crops,
    )
    return InspectedEdit(
        measures,
        prepared=save(prepared),
        alpha=save({str(index): np.frombuffer(data, np.uint8) for index, data in enumerate(packed)}),
        references=beside.packed or None,
    )


def finish_regions(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    alphas: bytes,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Sequence[Pixels],
    crops: Sequence[tuple[int, int, int, int]],
) -> bytes:
    """The finished file: each decoded region pasted into its crop of the original, in their order.

    Another output size is resized to once, at the end.
    """
    original = decode(image, limits.max_pixels)
    size = output_size(Size.of(original.pixels), parameters.output_size, limits.max_pixels)
    packed = load(alphas)
    pixels = original.pixels
    for index, (region, crop) in enumerate(zip(painted, crops, strict=True)):
        alpha = masks.unpack_alpha(packed[str(index)].tobytes())
        pixels = paste(pixels, alpha, region, crop=Box(*crop))
    return encode_as_asked(DecodedPicture(resize(pixels, size), original.icc_profile), parameters)


def measure_generation(
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    reference_grids: tuple[tuple[int, int], ...] = (),
) -> Inspection:
    """Measures of the pictures that `card` will make: every token is computed, and there is nothing to paste into.

    Raises:
        TooManyPixels: the size asked for exceeds a limit.
    """
    budget_pixels = min(limits.budget_pixels, limits.max_pixels)
    size = generated_size(parameters.output_size, card.native_size, budget_pixels, card.pixel_multiple)
    return _measures(
        size, size, size, card, reference_grids, has_alpha=False, template_key="", generated=True
    )
