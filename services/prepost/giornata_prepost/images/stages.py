"""The two stages of image work: inspection, before any model runs, and finishing, after the last one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from giornata.wire.adapters import ControlUse
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import Inspection
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode
from giornata.wire.values import CellMap
from giornata_prepost.images import masks
from giornata_prepost.images.conditions import ModelCrop, PreparedReferences, control_images, prepare
from giornata_prepost.images.geometry import (
    Box,
    Size,
    crop_box,
    crop_size,
    crops_alike,
    generated_size,
    model_size,
    output_size,
)
from giornata_prepost.images.masks import Alpha
from giornata_prepost.images.paste import paste, resize
from giornata_prepost.images.pictures import DecodedPicture, Pixels, decode, encode_as_asked, flatten

# The two stages of image work: inspection, before any model runs, and finishing, after the last one.


@dataclass(frozen=True)
class PixelLimits:
    """The largest pictures, in pixels (width times height)."""

    max_pixels: int
    """Limit of an image, a mask and an output."""
    budget_pixels: int
    """Limit of the picture that the model computes."""


@dataclass(frozen=True)
class EditSizes:
    """The sizes of the pictures of one edit, as :class:`giornata.wire.jobs.Inspection` explains."""

    width: int
    height: int
    has_alpha: bool
    model_width: int
    model_height: int
    output_width: int
    output_height: int
    tokens: int
    companion_tokens: int
    reference_grids: tuple[tuple[int, int], ...]

    @classmethod
    def of(  # noqa: PLR0917 - the sizes follow from all of it
        cls,
        original: DecodedPicture,
        model: Size,
        beside: PreparedReferences,
        parameters: EditParameters,
        card: ModelCard,
        limits: PixelLimits,
    ) -> Self:
        """The sizes of an edit of `original` that is computed at the size `model`.

        Raises as :func:`output_size`, and InvalidField where an opaque picture is to have a transparent background.
        """
        height, width, channels = original.pixels.shape
        if parameters.background == "transparent" and channels != 4:
            raise InvalidField(
                "An edit keeps the transparency of its image, and this image has none.",
                field="background",
                received=parameters.background,
                accepted="auto or opaque, or an image with an alpha channel",
            )
        output = output_size(Size(width, height), parameters.output_size, limits.max_pixels)
        tokens = model.pixels // card.pixel_multiple**2
        return cls(
            width=width,
            height=height,
            has_alpha=channels == 4 and parameters.background != "opaque",
            model_width=model.width,
            model_height=model.height,
            output_width=output.width,
            output_height=output.height,
            tokens=tokens,
            companion_tokens=card.companion_tokens(
                tokens, [rows * columns for rows, columns in beside.grids]
            ),
            reference_grids=beside.grids,
        )


@dataclass(frozen=True)
class InspectedEdit(EditSizes):
    """Measures of one edit, and the blobs to be stored."""

    compute_tokens: int
    mask_ratio: float
    compute_set: dict[int, CellMap] | None
    pixel_ratio: float
    """Share of the original's pixels with an effective alpha above 0."""
    template_key: str
    mask_key: str
    mask_whole: bool
    crop: Box | None
    prepared: bytes
    alpha: bytes
    """The effective alpha, by :func:`giornata_prepost.images.masks.pack_alpha`."""
    references: bytes | None
    """See :attr:`giornata.wire.jobs.Inspection.references`."""
    controls: bytes | None = None
    """See :attr:`giornata.wire.jobs.Inspection.controls`."""
    crops: tuple[Box, ...] = ()
    """See :attr:`giornata.wire.jobs.Inspection.crops`."""


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
            :func:`~giornata_prepost.images.geometry.output_size` and
            :func:`~giornata_prepost.images.conditions.control_images` name.
    """
    original, alpha = read_edit(image, mask, parameters, limits)
    beside = prepare(references, card, limits.max_pixels, limits.budget_pixels)
    found, view = _measured(original, alpha, parameters, card, limits, beside)
    return replace(found, controls=control_images(*controls, view, limits.max_pixels))


def inspect_template(
    image: bytes, parameters: EditParameters, card: ModelCard, limits: PixelLimits
) -> InspectedEdit:
    """Measure a template: the picture as its edits see it, with an empty mask. Of `parameters`, `size` is read.

    Raises:
        BadRequest: as :func:`inspect`.
    """
    original = decode(image, limits.max_pixels)
    nothing = np.zeros(original.pixels.shape[:2], np.float32)
    found, _ = _measured(original, nothing, parameters, card, limits, PreparedReferences((), None, ()))
    return found


def finish(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    alpha: bytes,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Pixels,
    crop: Box | None = None,
) -> bytes:
    """The finished file: `painted`, the decoded picture at the model's size, pasted into the original file.

    `alpha` and `crop` are what the inspection found, with the same limits.
    """
    original = decode(image, limits.max_pixels)
    size = output_size(Size.of(original.pixels), parameters.output_size, limits.max_pixels)
    pixels = paste(original.pixels, masks.unpack_alpha(alpha), painted, size, crop)
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


def _measured(  # noqa: PLR0917 - one of two callers has no mask
    original: DecodedPicture,
    alpha: Alpha,
    parameters: EditParameters,
    card: ModelCard,
    limits: PixelLimits,
    beside: PreparedReferences,
) -> tuple[InspectedEdit, ModelCrop]:
    """Measures of an edit, or of a template, whose alpha is 0 everywhere; and what the model sees of it."""
    size = Size.of(original.pixels)
    crop, model = visible_part(alpha, parameters.padding_mask_crop, card, limits.budget_pixels)
    window = (crop or Box(0, 0, *size)).window
    seen = resize(flatten(original.pixels[window]), model)
    edited = masks.model_mask(alpha[window], model, card.mask_grain)
    sizes = EditSizes.of(original, model, beside, parameters, card, limits)
    compute_tokens = int(np.count_nonzero(masks.pool_cells(edited, card.pixel_multiple)))
    computed = masks.compute_set(edited, parameters.halo, card.pixel_multiple)
    found = InspectedEdit(
        **vars(sizes),
        compute_tokens=compute_tokens,
        mask_ratio=compute_tokens / sizes.tokens,
        compute_set=None if computed is None else {1: computed},
        pixel_ratio=float(np.count_nonzero(alpha) / alpha.size),
        template_key=_template_key(seen, card, beside.pictures),
        mask_key=_mask_key(edited),
        mask_whole=bool(edited.all()),
        crop=crop,
        prepared=save({"image": np.ascontiguousarray(seen), "mask": edited.astype(np.uint8) * np.uint8(255)}),
        alpha=masks.pack_alpha(alpha),
        references=beside.packed,
    )
    return found, ModelCrop(size, crop, model, seen)


def _mask_key(edited: masks.Region) -> str:
    """See :attr:`giornata.wire.jobs.Inspection.mask_key`."""
    height, width = edited.shape
    return hashlib.sha256(struct.pack("<2I", height, width) + np.packbits(edited).tobytes()).hexdigest()


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


# The two stages of image work of an edit whose regions are painted one by one, each in a crop, and pasted
# together.


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
    size = Size.of(original.pixels)
    beside = prepare(references, card, limits.max_pixels, limits.budget_pixels)
    packed: list[bytes] = []
    marked: list[Box] = []
    pixels = 0
    for region in regions:
        marks = decode(region, limits.max_pixels, "mask").pixels
        edited = masks.edited_region(original.pixels, marks, MaskMode.WHITE)
        alpha = masks.effective_alpha(edited, parameters.grow_mask, parameters.mask_blur)
        marked.append(masks.bounds(alpha > 0, parameters.padding_mask_crop or 0))
        packed.append(masks.pack_alpha(alpha))
        pixels += int(np.count_nonzero(alpha))
    crops, model = crops_alike(marked, size, card.native_size, limits.budget_pixels, card.pixel_multiple)
    prepared: dict[str, npt.NDArray[np.uint8]] = {}
    touched = 0  # tokens
    for index, (crop, alpha) in enumerate(zip(crops, _unpacked(packed), strict=True)):
        seen = resize(flatten(original.pixels[crop.window]), model)
        mask = masks.model_mask(alpha[crop.window], model, card.mask_grain)
        touched += int(np.count_nonzero(masks.pool_cells(mask, card.pixel_multiple)))
        prepared[f"image_{index}"] = np.ascontiguousarray(seen)
        prepared[f"mask_{index}"] = mask.astype(np.uint8) * np.uint8(255)
    sizes = EditSizes.of(original, model, beside, parameters, card, limits)
    return InspectedEdit(
        **vars(sizes),
        compute_tokens=touched,
        mask_ratio=touched / (sizes.tokens * len(crops)),
        compute_set=None,
        pixel_ratio=pixels / size.pixels,
        template_key="",
        mask_key="",
        mask_whole=False,
        crop=None,
        crops=crops,
        prepared=save(prepared),
        alpha=save({str(index): np.frombuffer(data, np.uint8) for index, data in enumerate(packed)}),
        references=beside.packed,
    )


def finish_regions(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    alphas: bytes,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Sequence[Pixels],
    crops: Sequence[Box],
) -> bytes:
    """The finished file: each decoded region pasted into its crop of the original, in their order.

    Another output size is resized to once, at the end.
    """
    original = decode(image, limits.max_pixels)
    size = output_size(Size.of(original.pixels), parameters.output_size, limits.max_pixels)
    packed = load(alphas)
    pixels = original.pixels
    each = _unpacked([packed[str(index)].tobytes() for index in range(len(crops))])
    for alpha, region, crop in zip(each, painted, crops, strict=True):
        pixels = paste(pixels, alpha, region, crop=crop)
    return encode_as_asked(DecodedPicture(resize(pixels, size), original.icc_profile), parameters)


def _unpacked(packed: Sequence[bytes]) -> Iterator[masks.Alpha]:
    return (masks.unpack_alpha(data) for data in packed)


# The two stages of image work of a generation, which has no picture: its measures, and its file.


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
    tokens = size.pixels // card.pixel_multiple**2
    return Inspection(
        width=size.width,
        height=size.height,
        has_alpha=False,
        model_width=size.width,
        model_height=size.height,
        output_width=size.width,
        output_height=size.height,
        tokens=tokens,
        companion_tokens=card.companion_tokens(
            tokens, [height * width for height, width in reference_grids], generated=True
        ),
        reference_grids=reference_grids,
        compute_tokens=tokens,
        mask_ratio=1.0,
        template_key="",
    )


def finish_generation(parameters: EditParameters, painted: Pixels) -> bytes:
    """The finished file of `painted`, (height, width, 3) uint8."""
    return encode_as_asked(DecodedPicture(painted, icc_profile=None), parameters)
