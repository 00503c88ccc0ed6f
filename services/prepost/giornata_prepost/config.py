"""Settings of prepost."""

from __future__ import annotations

from pydantic import Field

from giornata.checkpoints import ModelConfig


class PrepostConfig(ModelConfig):
    """Configuration of prepost."""

    image_processes: int = Field(
        2, ge=1, le=64, description="Processes for decoding, masks, pasting and encoding."
    )
    image_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Time that one picture may take in such a process."
    )
    max_pixels: int = Field(
        40_000_000, ge=1024, le=178_956_970, description="Most pixels of an image, a mask or an output."
    )
    model_pixels: int = Field(
        1024 * 1024,
        ge=1024,
        le=16 << 20,
        description="Most pixels that the model computes; larger pictures are scaled down to it.",
    )
