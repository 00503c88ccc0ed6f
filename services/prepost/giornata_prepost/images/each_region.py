"""The two stages of image work of an edit whose regions are painted one by one, each in a crop, and pasted together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode
from giornata_prepost.images import masks
from giornata_prepost.images.geometry import Box, Size, crops_alike, output_size
from giornata_prepost.images.paste import paste, resize
from giornata_prepost.images.pictures import DecodedPicture, Pixels, decode, encode_as_asked, flatten
from giornata_prepost.images.references import prepare
from giornata_prepost.images.stages import EditSizes, InspectedEdit, PixelLimits


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
        packed.append(masks.pack(alpha))
        pixels += int(np.count_nonzero(alpha))
    crops, model = crops_alike(marked, size, card.native_size, limits.budget_pixels, card.pixel_multiple)
    prepared: dict[str, npt.NDArray[np.uint8]] = {}
    touched = 0  # tokens
    for index, (crop, alpha) in enumerate(zip(crops, _unpacked(packed), strict=True)):
        seen = resize(flatten(original.pixels[crop.window]), model)
        mask = masks.model_mask(alpha[crop.window], model, card.mask_grain)
        touched += int(np.count_nonzero(masks.cells(mask, card.pixel_multiple)))
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
    return (masks.unpack(data) for data in packed)
