"""What a served model is. :mod:`giornata.families` reads it from a checkpoint's folder.

The digest lets a rolling model change never mix two autoencoders: it travels with every job and every worker's state.
"""

from __future__ import annotations

from enum import StrEnum

from giornata.wire.values import Wire


class Task(StrEnum):
    """What a picture is made from."""

    EDIT = "edit"
    """A picture and a mask."""
    GENERATE = "generate"
    """Text alone."""


class ModelCard(Wire):
    """A served model: what the gateway validates against and the router matches."""

    name: str
    family: str
    """Names what computes it in prepost and in the denoiser; see :data:`giornata.families.KINDS`."""
    digest: str
    """sha-256 over configuration files and samples of the weight files."""
    vae_scale_factor: int
    """Pixels a latent pixel stands for, per side (8 for Flux)."""
    token_latents: int = 2
    """Latent pixels a side of a token."""
    mask_grain: int = 1
    """Model pixels a side of the cells in which the family tells edited from kept."""
    latent_channels: int
    max_text_tokens: int
    """Length to which prompts are padded, as diffusers' `max_sequence_length`."""
    takes_guidance: bool
    """Whether the transformer embeds a distilled guidance scale."""
    takes_true_cfg: bool
    default_steps: int
    default_guidance_scale: float
    default_strength: float
    tasks: tuple[Task, ...] = (Task.EDIT,)
    """What it is served for; versions before it was told know edits alone."""
    generation_guidance_scale: float | None = None
    """Default of generations; None where it generates nothing."""
    native_size: int = 1024
    """Pixels a side of the square pictures that the checkpoint was made for: `sample_size` of its autoencoder."""

    @property
    def pixel_multiple(self) -> int:
        """Pixels a side of a token; sides of the model's picture are multiples of it."""
        return self.token_latents * self.vae_scale_factor
