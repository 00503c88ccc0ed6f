"""`ControlNetModel` of Stable Diffusion 1 and 2 and SDXL: pictures of one size share a forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from giornata.control.layout import Behind
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    ControlSequenceStep,
    ControlText,
    count_weights,
    grouped_samples,
    skip_channels,
)
from giornata.packed.packing import maps_to_tiles, tiles_to_maps, to_device
from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.controlnets import ControlBase

TIME_IDS: Final = 6
"""Sizes of SDXL's micro-conditioning."""
TEXT_TOKENS: Final = 77
"""CLIP's, over which UNets attend."""


@dataclass(frozen=True, eq=False)
class UnetControlSession:
    """The tensors that all steps of one row share, on the device."""

    hint: Tensor
    """(channels, height, width): the control image's embedding."""
    grid: tuple[int, int]
    texts: tuple[ControlText, ...]
    times: Tensor
    """(steps,)"""


class UnetControl(ControlNet):
    """A loaded ControlNet of a UNet.

    Latents are (tiles, channels * side²), without an inpainting model's further channels.
    """

    def __init__(self, net: ControlNetModel, card: ControlCard) -> None:
        super().__init__(net, card)
        self.samples = len(self.net.controlnet_down_blocks) + 1
        """How many it makes: one of each skip connection, and one of the middle."""
        # The control image is embedded once for all steps: a forward is given the embedding, in place of pixels.
        self._embedding: nn.Module = self.net.controlnet_cond_embedding
        self._reversed = net.config.controlnet_conditioning_channel_order == "bgr"
        self.net.controlnet_cond_embedding = nn.Identity()
        self.net.register_to_config(controlnet_conditioning_channel_order="rgb")

    def behind(self, base: ControlBase) -> Behind:
        """One sample each, in their order."""
        config = self.net.config
        side = self._side(base)
        pooled = None
        if config.addition_embed_type is not None:
            sizes = TIME_IDS * int(config.addition_time_embed_dim)
            pooled = int(config.projection_class_embeddings_input_dim) - sizes
        self.check_fits(
            base,
            ("channels of latents", int(config.in_channels) * side**2, base.latent_channels),
            ("width of text", int(config.cross_attention_dim), base.text_channels),
            ("width of pooled text", pooled, base.pooled_channels),
            ("pixels of a token", side * self._hint_pixels, base.token_pixels),
            ("skip connections", skip_channels(self.net, side), base.channels),
        )
        return tuple(range(self.samples))

    def work(self, base: ControlBase) -> ControlWork:
        """All steps share the embedding of the control image."""
        net, side = self.net, self._side(base)
        tally = _Tally(count_weights(net.time_embedding, getattr(net, "add_embedding", None)))
        outputs = iter(net.controlnet_down_blocks)
        tally.cells(side, net.conv_in, next(outputs))
        for block in net.down_blocks:
            attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
            for resnet, transformer in zip(block.resnets, attentions, strict=True):
                tally.resnet(side, resnet)
                tally.transformer(side, transformer)
                tally.cells(side, next(outputs))
            for sampler in block.downsamplers or ():
                side //= 2
                tally.cells(side, sampler.conv, next(outputs))
        for resnet, transformer in zip_longest(net.mid_block.resnets, net.mid_block.attentions):
            tally.resnet(side, resnet)
            tally.transformer(side, transformer)
        tally.cells(side, net.controlnet_mid_block)
        return ControlWork(sequence=tally.sequence, image=tally.image, pair=tally.pair)

    def _side(self, base: ControlBase) -> int:
        """Latent pixels a side of a token."""
        return math.isqrt(base.latent_channels // int(self.net.config.in_channels))

    @property
    def _hint_pixels(self) -> int:
        """Pixels of the control image a side of one of its embedding's."""
        return math.prod(conv.stride[0] for conv in self._embedding.modules() if isinstance(conv, nn.Conv2d))

    @torch.inference_mode()
    def open(self, conditions: ControlConditions) -> UnetControlSession:
        """Embed the control image."""
        self._check(conditions)
        pixels = to_device(conditions.hint, self.device).to(self.dtype)
        if self._reversed:
            pixels = pixels.flip(0)
        return UnetControlSession(
            self._embedding(pixels[None])[0],
            conditions.grid,
            tuple(text.mapped(partial(to_device, device=self.device)) for text in conditions.texts),
            to_device(conditions.times, self.device),
        )

    @torch.inference_mode()
    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """Items of one size and text length are one forward."""

        def key(item: ControlSequenceStep) -> object:
            return item.opened.grid, item.latents.shape[1], len(_text_of(item).embeds)

        yield from grouped_samples(items, key, self._forward)

    def _forward(self, items: Sequence[ControlSequenceStep]) -> Iterator[Tensor]:
        """(items, tokens, channels) of each sample."""
        grid, channels = items[0].opened.grid, int(self.net.config.in_channels)
        latents = torch.stack([item.latents for item in items])
        side = math.isqrt(latents.shape[2] // channels)
        sample = tiles_to_maps(latents.view(*latents.shape[:2], channels, side, side), grid)
        texts = [_text_of(item) for item in items]
        added = None
        if self.net.config.addition_embed_type is not None:
            pooled, sizes = (
                torch.stack([part for each in texts if (part := getattr(each, name)) is not None])
                for name in ("pooled", "time_ids")
            )
            added = {"text_embeds": pooled, "time_ids": sizes}
        skips, middle = self.net(
            sample,
            torch.stack([item.opened.times[item.step] for item in items]),
            torch.stack([each.embeds for each in texts]),
            controlnet_cond=torch.stack([item.opened.hint for item in items]),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return (maps_to_tiles(one, grid).flatten(2) for one in (*skips, middle))

    def _check(self, given: ControlConditions) -> None:
        for text in given.texts:
            self.check_width(text, int(self.net.config.cross_attention_dim))
            sized = text.pooled is not None and text.time_ids is not None
            if self.net.config.addition_embed_type is not None and not sized:
                raise self.mismatch("is one of SDXL, and the model's text has no pooled embedding")
        if given.hint.dim() != 3 or given.hint.shape[0] != 3:
            raise self.mismatch(
                f"takes a control image of (3, height, width), and was given {tuple(given.hint.shape)}"
            )


def _text_of(item: ControlSequenceStep) -> ControlText:
    text: ControlText = item.opened.texts[item.sequence]
    return text


class _Tally:
    """A count of what the modules of a UNet compute, where a token has `side` of their output's cells a side."""

    def __init__(self, sequence: float) -> None:
        self.sequence, self.image, self.pair = sequence, 0.0, 0.0

    def cells(self, side: int, *modules: Any) -> None:
        """Convolutions, or layers, that each cell of the output passes."""
        self.image += count_weights(*modules) * side**2

    def resnet(self, side: int, resnet: Any) -> None:
        """`ResnetBlock2D`."""
        self.sequence += count_weights(resnet.time_emb_proj)
        self.cells(side, resnet.conv1, resnet.conv2, resnet.conv_shortcut)

    def transformer(self, side: int, transformer: Any) -> None:
        """`Transformer2DModel`, or None: each of its blocks attends to the picture and to the text."""
        if transformer is None:
            return
        cells, of_text = side**2, 0.0
        for block in transformer.transformer_blocks:
            of_text += count_weights(block.attn2.to_k, block.attn2.to_v)
            self.pair += 2.0 * block.attn1.inner_dim * cells**2
            self.image += 2.0 * block.attn2.inner_dim * TEXT_TOKENS * cells
        self.image += (count_weights(transformer) - of_text) * cells
        self.sequence += of_text * TEXT_TOKENS
