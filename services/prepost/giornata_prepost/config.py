"""Settings of prepost."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from giornata.checkpoints import ModelConfig
from giornata.wire.loras import LORA_FILE_BYTES


class PrepostConfig(ModelConfig):
    """Configuration of prepost."""

    image_processes: ClassVar[int] = 2
    """Processes for decoding, masks, pasting and encoding."""
    image_timeout_s: ClassVar[float] = 10.0
    """Processor time that one picture may take in such a process."""
    lora_timeout_s: ClassVar[float] = 120.0
    """Processor time that reading one LoRA may take in a process of its own."""
    lora_file_bytes: ClassVar[int] = LORA_FILE_BYTES
    """Largest file of a LoRA."""
    lora_text_bytes: ClassVar[int] = 1 << 30
    """Bytes on disk of LoRAs' text parts that are kept for the next jobs."""
    mask_model: str | None = Field(
        None,
        min_length=1,
        description="What makes masks from words, where these are wanted: a local folder or a hub id of "
        "transformers' CLIPSeg, Grounding DINO, OWL-ViT or OWLv2, with weights as safetensors; default: masks "
        "from words are refused.",
    )
    mask_refiner: str | None = Field(
        None,
        min_length=1,
        description="What outlines the boxes of a detector that is `mask_model`, where a box is too coarse: a "
        "local folder or a hub id of SAM 2; default: a mask is the whole box.",
    )
    max_pixels: int = Field(
        40_000_000,
        ge=1024,
        le=178_956_970,
        description="Most pixels of an image, a mask or an output; fewer where memory is short.",
    )
    model_pixels: int = Field(
        1024 * 1024,
        ge=1024,
        le=16 << 20,
        description="Most pixels that the model computes, by what it was trained for; larger pictures are "
        "scaled down to it.",
    )

    text_encoders: Literal["auto", "device", "cpu"] = Field(
        "auto",
        description="Where text encoders compute; auto: on the device, or on the CPU where they do not fit beside the "
        "denoiser of the same GPU.",
    )

    @field_validator("mask_refiner")
    @classmethod
    def _refines_something(cls, refiner: str | None, info: ValidationInfo) -> str | None:
        if refiner is not None and info.data.get("mask_model", "") is None:
            raise ValueError("needs mask_model, a detector whose boxes it outlines")
        return refiner
