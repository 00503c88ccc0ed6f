"""What a denoiser can be told."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from giornata.checkpoints import ModelConfig
from giornata_denoiser.reuse.stored import BITS
from giornata_denoiser.reuse.template import Form


class TemplatePolicy(StrEnum):
    """What a miss means."""

    BACKGROUND = "background"
    """The edit computes everything; the template is recorded beside it, from its second edit on."""
    INLINE = "inline"
    """The template is recorded first."""
    OFF = "off"
    """The edit computes everything; what there is serves, and what is registered is recorded."""


class DenoiserConfig(ModelConfig):
    """Configuration of a denoiser."""

    capacity_rows: int = Field(
        8, ge=1, le=1024, description="Most rows of one step, and of what is accepted."
    )
    template_policy: TemplatePolicy = Field(
        TemplatePolicy.BACKGROUND, description="What happens where an edit's template has not been recorded."
    )
    template_form: Form = Field(
        Form.KV,
        description="What is recorded: `kv`, keys and values, or `hidden`, half the bytes and slower.",
    )
    template_bits: int = Field(
        8, description="Bits of recorded values: 8, 4, or 0 for those of the model's own dtype."
    )
    template_levels: int = Field(
        8, ge=1, le=200, description="Noise levels that are recorded; edits take the nearest one."
    )
    template_memory_mb: int = Field(
        2048, ge=0, description="Recorded templates in memory, in MiB, least recently used out first."
    )
    template_folder: Path | None = Field(
        None, description="Where recorded templates outlive the process; default nowhere."
    )
    template_disk_mb: int = Field(16_384, ge=0, description="Recorded templates in that folder, in MiB.")
    capacity_tokens: int = Field(
        65_536, ge=1, description="Most text and image tokens of one step; a larger row runs alone."
    )

    @model_validator(mode="after")
    def _bits_are_known(self) -> Self:
        if self.template_bits not in BITS:
            raise ValueError(f"template_bits must be one of {', '.join(map(str, BITS))}")
        return self
