"""Flux driven block by block, as other transformers are: what the written-out forward is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from giornata.packed.compute_set import Rotary
from giornata.packed.forward import AttentionSite, TokenStream
from giornata.tensors import EMBEDS, POOLED
from giornata_denoiser.families.driven.forward import JointAttention, SelfAttention
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.network import TRAIN_TIMESTEPS, Grid, PromptBuilder, cell_positions
from giornata_denoiser.rows.row import Prompt


class DrivenFlux(DrivenNetwork):
    """Blocks of two streams, then blocks that join their two streams themselves: these get an empty text stream."""

    def hook(self) -> None:
        model = self.transformer
        self.pairs, self.singles = model.transformer_blocks, model.single_transformer_blocks
        for index, block in enumerate(self.pairs):
            self.hooks.spread(block.norm1, "linear", TokenStream.IMAGE, functional.silu)
            self.hooks.spread(block.norm1_context, "linear", TokenStream.TEXT, functional.silu)
            block.attn.processor = JointAttention(self.hooks, AttentionSite(index))
        for index, block in enumerate(self.singles, len(self.pairs)):
            self.hooks.spread(block.norm, "linear", TokenStream.JOINT, functional.silu)
            block.attn.processor = SelfAttention(self.hooks, AttentionSite(index), TokenStream.JOINT)
        self.hooks.spread(model.norm_out, "linear", TokenStream.OUTPUT, functional.silu)

    @property
    def text(self) -> PromptBuilder:
        config = self.transformer.config
        return PromptBuilder(
            {EMBEDS: (None, config.joint_attention_dim), POOLED: (config.pooled_projection_dim,)}
        )

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        norm = block.norm if hasattr(block, "norm") else block.norm1
        normed: tuple[Tensor, ...] = norm(hidden, emb=hidden[:1, 0])
        return normed[:1]

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:
        scaled = [times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if self.transformer.config.guidance_embeds:
            scaled.append(torch.full_like(scaled[0], prompt.guidance_scale) * TRAIN_TIMESTEPS)
        pooled = prompt.tensors[POOLED].expand(len(times), -1)
        return self.hooks.vectors(self.transformer.time_text_embed(*scaled, pooled))

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        text = torch.zeros(text_tokens, 3, device=self.device, dtype=torch.long)
        picture = cell_positions(grid, self.device)
        turned: Rotary = self.transformer.pos_embed(torch.cat((text, picture)))
        return turned

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        after: tuple[Tensor, Tensor] = block(image, text, image[:1, 0])
        return after

    def single(self, block: Any, joint: Tensor) -> Tensor:
        after: Tensor = block(joint, joint[:, :0], joint[:1, 0])[1]
        return after
