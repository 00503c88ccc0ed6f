"""Stable Diffusion 3 and 3.5: `SD3Transformer2DModel`, as in `StableDiffusion3InpaintPipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor
from torch.nn import functional

from giornata.packed.forward import AttentionSite, TokenStream
from giornata.packed.packing import Rotary
from giornata.tensors import EMBEDS, POOLED
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata.wire.models import BlockSpec
from giornata_denoiser.families.driven.forward import JointAttention, SelfAttention
from giornata_denoiser.families.driven.network import DrivenNetwork, by_channel, multiplications, spec
from giornata_denoiser.families.network import PATCH, Grid, PromptBuilder
from giornata_denoiser.families.sampling import shifted_always
from giornata_denoiser.rows.row import Prompt


class StableDiffusion3(DrivenNetwork):
    """Blocks of two streams; the first ones of 3.5 have a second attention, of the picture alone.

    Positions are added to the tokens: a crop from the middle of a square table.
    """

    kind = SD3Transformer2DModel
    spacing = staticmethod(shifted_always)

    def hook(self) -> None:
        """See :class:`DrivenNetwork`.

        Raises:
            ValueError: the transformer sees the mask, as one of 33 input channels does.
        """
        if self.transformer.config.in_channels != self.transformer.out_channels:
            raise ValueError("an SD3 transformer whose input holds more than the latent is not served")
        self.pairs = self.transformer.transformer_blocks
        for index, block in enumerate(self.pairs):
            sites = 1 if block.attn2 is None else 2
            self.hooks.spread(block.norm1, "linear", TokenStream.IMAGE, functional.silu)
            self.hooks.spread(block.norm1_context, "linear", TokenStream.TEXT, functional.silu)
            block.attn.processor = JointAttention(self.hooks, AttentionSite(index, 0, sites))
            if block.attn2 is not None:
                block.attn2.processor = SelfAttention(
                    self.hooks, AttentionSite(index, 1, sites), TokenStream.IMAGE
                )
        self.hooks.spread(self.transformer.norm_out, "linear", TokenStream.OUTPUT, functional.silu)

    @property
    def text(self) -> PromptBuilder:
        """CLIP's and T5's embeddings one behind the other, and CLIP's pooled ones."""
        config = self.transformer.config
        joint, pooled = int(config.joint_attention_dim), int(config.pooled_projection_dim)
        tensors = {EMBEDS: (None, joint), POOLED: (pooled,)}
        return PromptBuilder(tensors, largest=int(config.pos_embed_max_size))

    def control_base(self, token_pixels: int) -> ControlBase:
        """See :class:`giornata_denoiser.controls.residuals.ControlledNetwork`."""
        model = self.transformer
        return ControlBase(
            kind=ControlKind.SD3,
            channels=(int(model.inner_dim),) * len(self.pairs),
            latent_channels=self.out_channels,
            token_pixels=token_pixels,
            text_channels=int(model.config.joint_attention_dim),
            pooled_channels=int(model.config.pooled_projection_dim),
        )

    def attentions(self, block: Any) -> Sequence[Any]:
        """See :class:`DrivenNetwork`."""
        return [attn for attn in (block.attn, block.attn2) if attn is not None]

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """The norm gives the first attention's input first, and the second's sixth."""
        normed: tuple[Tensor, ...] = block.norm1(hidden, emb=hidden[:1, 0])
        return normed[::5]

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        pooled = prompt.tensors[POOLED].expand(len(times), -1)
        return self.hooks.vectors(self.transformer.time_text_embed(times, pooled))

    def image_stream(self, latents: Tensor) -> Tensor:
        """A token's 2x2 pixels are what its patch embedding convolves."""
        embed = self.transformer.pos_embed.proj
        image = functional.linear(latents, embed.weight.flatten(1), embed.bias)
        self.low_ranks.add(embed, latents, image)
        return image

    def positions(self, grid: Grid) -> Tensor:
        """See :class:`DrivenNetwork`."""
        height, width = (side * PATCH for side in grid)
        cropped: Tensor = self.transformer.pos_embed.cropped_pos_embed(height, width)[0]
        return cropped.to(self.dtype)

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - it has none
        """None: positions are added to the tokens."""
        none = torch.empty(text_tokens + grid[0] * grid[1], 0, device=self.device)
        return none, none

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DrivenNetwork`; the last block has no text behind it."""
        after, image = block(image, text, image[:1, 0])
        return text if after is None else after, image

    def answer(self, image: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`; the transformer's channels come last in a patch."""
        return by_channel(super().answer(image))

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        sites = self.attentions(block)
        keys = sum(multiplications(attn.to_k, attn.to_v) for attn in sites)
        own = sum(multiplications(attn.to_q, attn.to_out) for attn in sites)
        attn = block.attn
        of_text = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        if not block.context_pre_only:  # else no text leaves it
            of_text += [attn.to_add_out, block.ff_context]
        return spec(
            attn,
            image=keys + own + multiplications(block.ff),
            text=multiplications(*of_text),
            keys=keys,
            sites=len(sites),
        )
