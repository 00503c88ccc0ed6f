"""The last stage: the painted picture into the original, encoded as asked. Free of torch."""

from __future__ import annotations

from giornata.wire.requests import EditParameters
from giornata_prepost.geometry import Box, Size
from giornata_prepost.inspection import PixelLimits, read_edit, requested_size
from giornata_prepost.paste import paste
from giornata_prepost.pictures import Picture, Pixels, encode


def finish(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    mask: bytes | None,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Pixels,
    crop: Box | None = None,
) -> bytes:
    """The finished file.

    The effective alpha is made again from the mask: it is cheaper to compute than to store at the original's
    size.

    Args:
        image: the original file.
        mask: the mask's file, if there was one.
        parameters: reads `size`, `output_format`, `output_compression` and the mask's options.
        limits: the same as at the inspection.
        painted: (h, w, 3) uint8, the decoded picture at the model's size.
        crop: what of the upright original it shows, as at the inspection; None for all of it.
    """
    original, alpha = read_edit(image, mask, parameters, limits)
    size = requested_size(Size(original.width, original.height), parameters, limits)
    pixels = paste(original.pixels, alpha, painted, size, crop)
    return encode(
        Picture(pixels, original.icc_profile), parameters.output_format, parameters.output_compression
    )
