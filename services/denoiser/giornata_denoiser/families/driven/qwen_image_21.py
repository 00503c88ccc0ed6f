"""Qwen-Image 2.1: `QwenImage21Transformer2DModel`, as in `QwenImage21Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from giornata.packed.region import Rotary
from giornata.wire.blocks import BlockSpec
from giornata_denoiser.families.driven.attention import SelfAttention
from giornata_denoiser.families.driven.forward import AttentionSite, TokenStream
from giornata_denoiser.families.driven.network import TRAIN_TIMESTEPS, DrivenNetwork
from giornata_denoiser.families.driven.prefix import Prefix, causal
from giornata_denoiser.families.driven.prompts import EMBEDS, DrivenPrompt, DrivenPromptBuilder
from giornata_denoiser.families.driven.specs import multiplications, spec
from giornata_denoiser.families.positions import of_complex
from giornata_denoiser.families.references import Grid


class QwenImage21Attention(SelfAttention):
    """Attention of a block whose positions, masks and cache are arguments; here they are the forward's."""

    def __call__(self, attn: Any, hidden_states: Tensor, **_: object) -> Tensor:  # type: ignore[override]  # as diffusers'
        """See :class:`SelfAttention`."""
        return super().__call__(attn, hidden_states)


class QwenImage21(DrivenNetwork):
    """Blocks of the picture alone, which share their modulation. Text is a prefix; a token is one latent pixel."""

    def hook(self) -> None:
        """See :class:`DrivenNetwork`.

        Raises:
            ValueError: text is modulated by the noise level, so that it is no prefix, or latents are cut into patches.
        """
        model, config = self.transformer, self.transformer.config
        if not config.causal_condition:
            raise ValueError("a Qwen-Image 2.1 transformer without causal_condition is not served")
        if config.patch_size != 1:
            raise ValueError(f"a Qwen-Image 2.1 transformer has patch_size 1, received {config.patch_size}")
        self.pairs = model.transformer_blocks
        self.hooks.spread(model, "modulation", TokenStream.IMAGE)
        self.hooks.spread(model.norm_out, "linear", TokenStream.OUTPUT, nn.SiLU())
        for index, block in enumerate(self.pairs):
            block.attn.processor = QwenImage21Attention(self.hooks, AttentionSite(index), TokenStream.IMAGE)

    @property
    def text(self) -> DrivenPromptBuilder:
        """Qwen3-VL's embeddings of the prompt's own tokens."""
        return DrivenPromptBuilder({EMBEDS: (None, int(self.transformer.config.context_in_dim))}, causal=True)

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        scale, *_ = self.transformer.modulation(hidden[:1, 0]).unsqueeze(1).chunk(4, dim=-1)
        return (block.img_norm1(hidden) * (1 + scale),)

    def vectors(self, prompt: DrivenPrompt, times: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """See :class:`DrivenNetwork`."""
        fractions = times.to(self.dtype) / TRAIN_TIMESTEPS
        return self.hooks.vectors(self.transformer.time_text_embed(fractions, fractions))

    def text_stream(self, prompt: DrivenPrompt) -> Tensor:
        """None: all text is the prefix."""
        return prompt.embeds.new_empty(0, self.transformer.inner_dim)

    def image_stream(self, latents: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        image: Tensor = self.transformer.img_in(latents)
        return image

    def prefix(
        self,
        prompt: DrivenPrompt,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - protocol
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
    ) -> Prefix:
        """The text, each token of which attends to those before it."""
        tokens = prompt.prefix_tokens
        cosine, sine = self.rotary(tokens, prompt.grid, ())
        return Prefix(self.transformer.txt_in(prompt.embeds), (cosine[:tokens], sine[:tokens]), causal)

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - it has none
        """Text goes on along all three axes; the picture lies at the place behind it, counted from its middle."""
        cells = grid[0] * grid[1]
        of_picture = torch.arange(text_tokens + cells) >= text_tokens
        return of_complex(self.transformer.pos_embed([(1, *grid)], of_picture, self.device))

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """There is no text beside the picture."""
        return text, block(image, self.transformer.modulation(image[:1, 0]))

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """A token is a latent pixel."""
        return latent.T.reshape(-1, *grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """The inverse of :meth:`unpacked`."""
        return pixels.flatten(1).T.contiguous()

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        attn = block.attn
        keys = multiplications(attn.to_k, attn.to_v)
        return spec(attn, image=keys + multiplications(attn.to_q, attn.to_out, block.img_mlp), keys=keys)
