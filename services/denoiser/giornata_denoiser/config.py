"""What a denoiser can be told."""

from __future__ import annotations

from pydantic import Field

from giornata.checkpoints import ModelConfig


class DenoiserConfig(ModelConfig):
    """Configuration of a denoiser."""

    capacity_rows: int = Field(
        8, ge=1, le=1024, description="Most rows of one step, and of what is accepted."
    )
    capacity_tokens: int = Field(
        65_536, ge=1, description="Most text and image tokens of one step; a larger row runs alone."
    )
