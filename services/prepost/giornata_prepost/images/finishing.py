"""The last stage: paste the painted picture into the original and encode it."""

from __future__ import annotations

from giornata.wire.requests import EditParameters
from giornata_prepost.images.alpha import unpack
from giornata_prepost.images.geometry import Box, Size
from giornata_prepost.images.inspection import PixelLimits, requested_size
from giornata_prepost.images.paste import paste
from giornata_prepost.images.pictures import DecodedPicture, Pixels, decode, encode


def finish(  # noqa: PLR0917 - the pool passes by position
    image: bytes,
    alpha: bytes,
    parameters: EditParameters,
    limits: PixelLimits,
    painted: Pixels,
    crop: Box | None = None,
) -> bytes:
    """The finished file.

    Args:
        image: the original file.
        alpha: the effective alpha, as the inspection packed it.
        parameters: reads `size`, `output_format` and `output_compression`.
        limits: the same as at the inspection.
        painted: (h, w, 3) uint8, the decoded picture at the model's size.
        crop: the part of the upright original that it shows, as at the inspection; None for all of it.
    """
    original = decode(image, limits.max_pixels, "image")
    size = requested_size(Size(original.width, original.height), parameters, limits)
    pixels = paste(original.pixels, unpack(alpha), painted, size, crop)
    return encode(
        DecodedPicture(pixels, original.icc_profile), parameters.output_format, parameters.output_compression
    )
