"""The transformer of Flux checkpoints, `FluxTransformer2DModel`, over packed sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.packed.attention import choose
from giornata.packed.sequences import Rotary, Sequences
from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use
from giornata_denoiser.families.flux.forward import FluxForward, as_tensor
from giornata_denoiser.rows.sigmas import TRAIN_TIMESTEPS

PATCH = 2
"""Latent pixels a side of a token."""
ROTARY_CACHE = 64
"""Rotary embeddings kept, one per picture size and text length: 4.7 MB for 1024x1024 pixels."""


class PackedFlux:
    """The transformer of Flux checkpoints over packed sequences."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer: Any = transformer
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self._attend = choose(self.device, self.dtype)
        self.rotary = lru_cache(maxsize=ROTARY_CACHE)(self._rotary)

    @property
    def in_channels(self) -> int:
        """Channels of an image token that the transformer takes."""
        return int(self.transformer.config.in_channels)

    @property
    def out_channels(self) -> int:
        """Channels of an image token's velocity."""
        return int(self.transformer.out_channels)

    @property
    def prompt_channels(self) -> tuple[int, int]:
        """Channels of prompt embeddings and of pooled prompt embeddings."""
        config = self.transformer.config
        return int(config.joint_attention_dim), int(config.pooled_projection_dim)

    @property
    def blocks(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Family.blocks`."""
        return len(self.transformer.transformer_blocks) + len(self.transformer.single_transformer_blocks)

    @property
    def heads(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Family.heads`."""
        return int(self.transformer.config.num_attention_heads)

    @property
    def width(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Family.width`."""
        return int(self.transformer.inner_dim)

    def touched(self, conditioning: Mapping[str, Tensor]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Family.touched`."""
        return conditioning["mask"].amax(dim=1) > 0

    def velocity(
        self,
        sequences: Sequences,
        image: Tensor,
        timestep: Tensor,
        uses: Sequence[Use] = (),
        trace: Tracing = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Family.velocity`."""
        conditioning = self._conditioning(sequences, timestep)
        return FluxForward(self.transformer, self._attend, sequences, conditioning, uses, trace=trace).run(
            image
        )

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Family.unpacked`; the inverse of `_pack_latents`."""
        height, width = grid
        patches = latent.view(height, width, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        return patches.reshape(-1, height * PATCH, width * PATCH)

    def _rotary(self, text_tokens: int, grid: tuple[int, int]) -> Rotary:
        """Text is at (0, 0, 0); the image token of line y and column x at (0, y, x)."""
        ids = torch.zeros(text_tokens + grid[0] * grid[1], 3, device=self.device)
        ids[text_tokens:, 1] = torch.arange(grid[0], device=self.device).repeat_interleave(grid[1])
        ids[text_tokens:, 2] = torch.arange(grid[1], device=self.device).repeat(grid[0])
        cosine, sine = self.transformer.pos_embed(ids)
        return cosine, sine

    def _conditioning(self, sequences: Sequences, timestep: Tensor) -> Tensor:
        """(sequences, inner_dim): what modulates every block. Rounds to the dtype where diffusers does."""
        model = self.transformer
        scaled = [timestep.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if model.config.guidance_embeds:
            scaled.append(sequences.guidance.to(self.dtype) * TRAIN_TIMESTEPS)
        return as_tensor(model.time_text_embed(*scaled, sequences.pooled))
