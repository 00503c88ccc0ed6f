"""What a ControlNet sees of its control image, by its configuration. Free of torch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from giornata.wire.adapters import ControlInput


def control_input(config: Mapping[str, Any]) -> ControlInput:
    """By a ControlNet's ``config.json``, as the pipelines of diffusers decide it.

    `FluxControlNetInpaintPipeline` encodes no image for a ControlNet with an `input_hint_block`;
    `StableDiffusion3ControlNetPipeline` subtracts no shift where the pooled text is replaced by zeros, and
    `StableDiffusion3ControlNetInpaintingPipeline` gives ControlNets with one extra channel the mask.

    Raises:
        ValueError: it has other extra channels than a mask.
    """
    network = config.get("_class_name")
    if network == "FluxControlNetModel" and config.get("conditioning_embedding_channels") is not None:
        return ControlInput.PIXELS
    if network != "SD3ControlNetModel":
        return ControlInput.USUAL
    match config.get("extra_conditioning_channels") or 0:
        case 0:
            pass
        case 1:
            return ControlInput.MASKED
        case more:
            raise ValueError(f"a ControlNet of SD3 has {more} extra channels; served are 0, or 1 for a mask")
    unshifted = config.get("force_zeros_for_pooled_projection", True)
    return ControlInput.UNSHIFTED if unshifted else ControlInput.USUAL
