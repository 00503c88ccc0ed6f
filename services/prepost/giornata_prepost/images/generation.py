"""The two stages of image work of a generation, which has no picture: its measures, and its file."""

from __future__ import annotations

from giornata.wire.jobs import Inspection
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata_prepost.images.geometry import generated_size
from giornata_prepost.images.pictures import DecodedPicture, Pixels, encode_as_asked
from giornata_prepost.images.stages import PixelLimits


def measured(
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


def finished(parameters: EditParameters, painted: Pixels) -> bytes:
    """The finished file of `painted`, (height, width, 3) uint8."""
    return encode_as_asked(DecodedPicture(painted, icc_profile=None), parameters)
