"""Prompts of Flux checkpoints: embeddings that pass all blocks, and a pooled vector that modulates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FluxPrompt:
    """One sequence's prompt; satisfies :class:`giornata_denoiser.rows.row.Prompt`."""

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

    joint_dim: int
    """Channels of a text token."""
    pooled_dim: int

    @property
    def tensors(self) -> Mapping[str, tuple[int | None, ...]]:
        """Embeddings of T5, pooled embedding of CLIP."""
        return {"prompt_embeds": (None, self.joint_dim), "pooled_prompt_embeds": (self.pooled_dim,)}

    def prompt(
        self,
        tensors: Mapping[str, Tensor],
        grid: tuple[int, int],  # noqa: ARG002 - protocol
        guidance_scale: float,
    ) -> FluxPrompt:
        """Both tensors as they are."""
        return FluxPrompt(tensors["prompt_embeds"], tensors["pooled_prompt_embeds"], guidance_scale)
