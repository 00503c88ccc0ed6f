"""Prompts of Flux checkpoints: embeddings that pass all blocks, and a pooled vector that modulates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FluxPrompt:
    """One sequence's prompt; satisfies :class:`giornata_denoiser.rows.prompt.Prompt`."""

    embeds: Tensor
    """(text_tokens, joint_dim)"""
    pooled: Tensor
    """(pooled_dim,)"""
    guidance_scale: float
    """Distilled guidance; read only where the transformer embeds it."""

    @property
    def joint_tokens(self) -> int:
        """All of its tokens."""
        return len(self.embeds)

    @property
    def size_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.embeds.nbytes + self.pooled.nbytes

    def to(self, device: torch.device) -> FluxPrompt:
        """The same prompt on `device`."""
        return replace(self, embeds=self.embeds.to(device), pooled=self.pooled.to(device))


@dataclass(frozen=True)
class FluxText:
    """What a prompt becomes; satisfies :class:`giornata_denoiser.families.protocol.Text`."""

    tensors: Mapping[str, tuple[int | None, ...]]

    def prompt(
        self,
        tensors: Mapping[str, Tensor],
        grid: tuple[int, int],  # noqa: ARG002 - protocol
        guidance_scale: float,
    ) -> FluxPrompt:
        """Both tensors as they are."""
        return FluxPrompt(tensors["prompt_embeds"], tensors["pooled_prompt_embeds"], guidance_scale)
