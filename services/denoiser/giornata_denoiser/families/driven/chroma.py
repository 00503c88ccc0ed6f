"""Chroma: `ChromaTransformer2DModel`, as in `ChromaInpaintPipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
from torch import Tensor

from giornata.packed.forward import AttentionSite, TokenStream
from giornata.packed.packing import Rotary
from giornata_denoiser.families.driven.forward import JointAttention, SelfAttention
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.network import TRAIN_TIMESTEPS, Grid, cell_positions
from giornata_denoiser.rows.row import Prompt


class Chroma(DrivenNetwork):
    """Flux's blocks, modulated by one small network instead of a layer each; T5's padding is not computed."""

    kind = ChromaTransformer2DModel

    def hook(self) -> None:
        """In the order in which the network makes the vectors."""
        model, width = self.transformer, int(self.transformer.inner_dim)
        self.pairs, self.singles = model.transformer_blocks, model.single_transformer_blocks
        for block in self.singles:
            self.hooks.spread_argument(block.norm, 3, width, TokenStream.JOINT)
        for block in self.pairs:
            self.hooks.spread_argument(block.norm1, 6, width, TokenStream.IMAGE)
        for block in self.pairs:
            self.hooks.spread_argument(block.norm1_context, 6, width, TokenStream.TEXT)
        self.hooks.spread_argument(model.norm_out, 2, width, TokenStream.OUTPUT)
        for index, block in enumerate(self.pairs):
            block.attn.processor = JointAttention(self.hooks, AttentionSite(index))
        for index, block in enumerate(self.singles, len(self.pairs)):
            block.attn.processor = SelfAttention(self.hooks, AttentionSite(index), TokenStream.JOINT)

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        norm = block.norm if hasattr(block, "norm") else block.norm1
        normed: tuple[Tensor, ...] = norm(hidden, emb=hidden[:1])
        return normed[:1]

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:  # noqa: ARG002 - of families whose text modulates
        """See :class:`DrivenNetwork`."""
        model = self.transformer
        embedded = model.time_text_embed(self.fractions(times) * TRAIN_TIMESTEPS)
        vectors: Tensor = model.distilled_guidance_layer(embedded)
        return vectors.flatten(1)

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - it has none
        """Text is at the origin."""
        text = torch.zeros(text_tokens, 3, device=self.device, dtype=torch.long)
        turned: Rotary = self.transformer.pos_embed(torch.cat((text, cell_positions(grid, self.device))))
        return turned

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DrivenNetwork`."""
        after: tuple[Tensor, Tensor] = block(image, text, image[:1])
        return after

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        after: Tensor = block(joint, joint[:1])
        return after

    def answer(self, image: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        model = self.transformer
        velocity: Tensor = model.proj_out(model.norm_out(image, emb=image[:1])).flatten(0, 1)
        return velocity
