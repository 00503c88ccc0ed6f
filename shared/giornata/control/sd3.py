"""`SD3ControlNetModel` of Stable Diffusion 3 and 3.5: pictures of one size and text length share a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from diffusers import SD3ControlNetModel
from torch import Tensor
from torch.nn import functional

from giornata.control.layout import Behind, sd3_layout
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    ControlSequenceStep,
    count_attention,
    count_weights,
    grouped_samples,
)
from giornata.packed.packing import to_device
from giornata.wire.adapters import ControlCard, ControlInput, ControlWork
from giornata.wire.controlnets import ControlBase

PATCH: Final = 2
"""Latent pixels a side of a token."""


@dataclass(frozen=True, eq=False)
class SD3ControlSession:
    """The tensors that all steps of one row share, on the device."""

    grid: tuple[int, int]
    added: Tensor
    """(tokens, inner_dim): positions and the embedded control image."""
    texts: tuple[Tensor, ...]
    """By sequence, (text_tokens, caption_dim)."""
    vectors: tuple[Tensor, ...]
    """By sequence, (steps, inner_dim): what modulates all blocks."""


class SD3Control(ControlNet):
    """A loaded ControlNet of Stable Diffusion 3."""

    def __init__(self, net: SD3ControlNetModel, card: ControlCard) -> None:
        super().__init__(net, card)
        self.samples = len(self.net.controlnet_blocks)
        """How many it makes."""

    def behind(self, base: ControlBase) -> Behind:
        """As `SD3Transformer2DModel.forward` adds samples."""
        config, blocks = self.net.config, len(base.channels)
        self.check_fits(
            base,
            ("width of blocks", self.net.inner_dim, base.channels[0]),
            ("channels of latents", int(config.in_channels) * PATCH**2, base.latent_channels),
            ("width of text", config.joint_attention_dim, base.text_channels),
            ("width of pooled text", config.pooled_projection_dim, base.pooled_channels),
            ("pixels of a token", config.patch_size, PATCH),
            ("blocks", self.samples, min(self.samples, blocks)),
        )
        return sd3_layout(blocks, self.samples)

    def work(self, base: ControlBase) -> ControlWork:  # noqa: ARG002 - its tokens are the network's
        """A block of 3.5 that attends twice does so to the picture alone."""
        net = self.net
        image, text, sequence = count_weights(net.pos_embed.proj, net.controlnet_blocks), 0.0, 0.0
        pair = text_pair = 0.0
        for block in net.transformer_blocks:
            of_image, of_text = count_attention(block.attn)
            image += of_image + count_weights(block.ff)
            text += of_text + count_weights(block.ff_context)
            sequence += count_weights(block.norm1, block.norm1_context)
            text_pair += 2 * block.attn.inner_dim
            if block.attn2 is not None:
                image += count_attention(block.attn2)[0]
                pair += 2 * block.attn2.inner_dim
        return ControlWork(
            sequence=sequence, image=image, text=text, pair=pair + text_pair, text_pair=text_pair
        )

    @torch.inference_mode()
    def open(self, conditions: ControlConditions) -> SD3ControlSession:
        """Embed texts and control image.

        InstantX's ControlNets are told zeros in place of the pooled text, as their configuration says; so are those
        that see the mask, as `StableDiffusion3ControlNetInpaintingPipeline` has it.
        """
        net, times = self.net, to_device(conditions.times, self.device)
        zeros = net.config.force_zeros_for_pooled_projection or self.card.sees is ControlInput.MASKED
        texts, vectors = [], []
        for text in conditions.texts:
            pooled = self.check_text(text, int(net.config.joint_attention_dim))
            pooled = to_device(pooled, self.device).to(self.dtype)
            if zeros:
                pooled = torch.zeros_like(pooled)
            texts.append(net.context_embedder(to_device(text.embeds, self.device).to(self.dtype)))
            vectors.append(net.time_text_embed(times, pooled.expand(len(times), -1)))
        height, width = (side * PATCH for side in conditions.grid)
        places = net.pos_embed.cropped_pos_embed(height, width)[0].to(self.dtype)
        hint = to_device(conditions.hint, self.device).to(self.dtype)
        self.check_hint(hint, conditions.grid, net.pos_embed_input.proj.in_channels * PATCH**2)
        hint = _embedded(net.pos_embed_input, hint)
        return SD3ControlSession(conditions.grid, places + hint, tuple(texts), tuple(vectors))

    @torch.inference_mode()
    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """Items of one size and text length are one forward."""
        yield from grouped_samples(
            items, lambda item: (item.opened.grid, len(item.opened.texts[item.sequence])), self._forward
        )

    def _forward(self, items: Sequence[ControlSequenceStep]) -> Iterator[Tensor]:
        """(items, tokens, inner_dim) of each sample, block by block."""
        net = self.net
        latents = torch.stack([item.latents for item in items])
        image = _embedded(net.pos_embed, latents) + torch.stack([item.opened.added for item in items])
        text = torch.stack([item.opened.texts[item.sequence] for item in items])
        vectors = torch.stack([item.opened.vectors[item.sequence][item.step] for item in items])
        for block, sample in zip(net.transformer_blocks, net.controlnet_blocks, strict=True):
            text, image = block(hidden_states=image, encoder_hidden_states=text, temb=vectors)
            yield sample(image)


def _embedded(embed: Any, patches: Tensor) -> Tensor:
    """(..., tokens, channels * 4) as its convolution sees their pixels: (..., tokens, inner_dim)."""
    return functional.linear(patches, embed.proj.weight.flatten(1), embed.proj.bias)
