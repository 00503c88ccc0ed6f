"""`FluxControlNetModel` over packed sequences: whatever sequences there are share one forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel
from torch import Tensor, nn
from torch.nn import functional

from giornata.control.layout import Behind, BlockCounts, flux_layout
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    ControlSequenceStep,
    count_attention,
    count_weights,
)
from giornata.packed import attention
from giornata.packed.flux import FluxComponents, FluxForward, FluxProjections, Modulation, prepare_modulation
from giornata.packed.low_rank import LowRankHooks
from giornata.packed.packing import UNTRACED, PackedBatch, Rotary, make_layout, to_device
from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.controlnets import ControlBase

TRAIN_TIMESTEPS: Final = 1000


@dataclass(frozen=True, eq=False)
class FluxControlSession:
    """The tensors that all steps of one sequence share, on the device."""

    modulation: Tensor
    """(steps, vectors * inner_dim)"""
    hint: Tensor
    """(tokens, inner_dim)"""
    text: Tensor
    """(text_tokens, inner_dim), a union's mode first."""
    rotary: Rotary


class FluxControl(ControlNet):
    """A loaded ControlNet of Flux."""

    def __init__(self, net: FluxControlNetModel, card: ControlCard) -> None:
        super().__init__(net, card)
        self.samples = BlockCounts(len(self.net.controlnet_blocks), len(self.net.controlnet_single_blocks))
        """How many it makes."""
        self.repeats = self.net.input_hint_block is not None
        """Whether double blocks take its samples in turns."""
        each = attention.choose_elementwise(self.device, self.dtype)
        attend = attention.choose_attention(self.device, self.dtype, each.gather)
        self._parts = FluxComponents(net, FluxProjections(net), attend, each, LowRankHooks(net))

    def behind(self, base: ControlBase) -> Behind:
        """As `FluxTransformer2DModel.forward` adds samples."""
        blocks = BlockCounts(len(base.channels) - base.singles, base.singles)
        config = self.net.config
        self.check_fits(
            base,
            ("width of blocks", self.net.inner_dim, max(base.channels)),
            ("channels of latents", config.in_channels, base.latent_channels),
            ("width of text", config.joint_attention_dim, base.text_channels),
            ("width of pooled text", config.pooled_projection_dim, base.pooled_channels),
            ("double blocks", self.samples.double, min(self.samples.double, blocks.double)),
            ("single blocks", self.samples.single, min(self.samples.single, blocks.single)),
            ("pixels of a token", self._hint_pixels or base.token_pixels, base.token_pixels),
        )
        return flux_layout(blocks, self.samples, repeats=self.repeats)

    @property
    def _hint_pixels(self) -> int | None:
        """Pixels a side of a token of what its `input_hint_block` makes; None without one."""
        if not self.repeats:
            return None
        strides = (
            conv.stride[0] for conv in self.net.input_hint_block.modules() if isinstance(conv, nn.Conv2d)
        )
        return math.prod(strides) * int(self.net.config.patch_size)

    def work(self, base: ControlBase) -> ControlWork:  # noqa: ARG002 - its tokens are the network's
        """All steps share what modulates its blocks, and sequences its samples."""
        net = self.net
        image = count_weights(net.x_embedder, net.controlnet_blocks, net.controlnet_single_blocks)
        text = pair = 0.0
        for block in net.transformer_blocks:
            of_image, of_text = count_attention(block.attn)
            image += of_image + count_weights(block.ff)
            text += of_text + count_weights(block.ff_context)
            pair += 2 * block.attn.inner_dim
        for block in net.single_transformer_blocks:
            both = count_attention(block.attn)[0] + count_weights(block.proj_mlp, block.proj_out)
            image, text = image + both, text + both
            pair += 2 * block.attn.inner_dim
        return ControlWork(image=image, text=text, pair=pair, text_pair=pair, shared=True)

    @torch.inference_mode()
    def open(self, conditions: ControlConditions) -> FluxControlSession:
        """Flux has one sequence."""
        net, given, own = self.net, conditions, conditions.texts[0]
        pooled = self.check_text(own, int(net.config.joint_attention_dim))
        text = net.context_embedder(to_device(own.embeds, self.device))
        mode = self._mode(given.mode)
        if mode is not None:
            text = torch.cat(
                [net.controlnet_mode_embedder(to_device(torch.tensor([mode]), self.device)), text]
            )
        hint = net.controlnet_x_embedder(self._hint(given))
        cells = torch.cartesian_prod(*(torch.arange(side) for side in given.grid)).float()
        places = torch.cat([torch.zeros(len(text), 3), functional.pad(cells, (1, 0))])
        times = to_device(given.times, self.device)
        scaled = [times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if net.config.guidance_embeds:
            scaled.append(torch.full_like(times, own.guidance_scale).to(self.dtype) * TRAIN_TIMESTEPS)
        pooled = to_device(pooled, self.device).expand(len(times), -1)
        return FluxControlSession(
            prepare_modulation(net, net.time_text_embed(*scaled, pooled)),
            hint,
            text,
            net.pos_embed(to_device(places, self.device)),
        )

    @torch.inference_mode()
    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """All items share one packed forward."""
        opened: list[FluxControlSession] = [item.opened for item in items]
        sequences = PackedBatch(
            make_layout(
                [len(each.text) for each in opened], [len(item.latents) for item in items], self.device
            ),
            (torch.cat([each.rotary[0] for each in opened]), torch.cat([each.rotary[1] for each in opened])),
            (None,) * len(items),
        )
        modulation = Modulation(self.net, [each.modulation for each in opened], [item.step for item in items])
        forward = FluxForward(self._parts, sequences, modulation, [], trace=UNTRACED)
        text, hint = (torch.cat([getattr(each, part) for each in opened]) for part in ("text", "hint"))
        latents = torch.cat([item.latents for item in items])
        tokens = [len(item.latents) for item in items]
        for sample in forward.samples(text, latents, hint):
            yield torch.split(sample, tokens)

    def _mode(self, mode: int | None) -> int | None:
        modes = self.card.modes
        if modes and (mode is None or mode >= modes):
            raise self.mismatch(f"needs a mode from 0 to {modes - 1}")
        if not modes and mode is not None:
            raise self.mismatch("takes no mode")
        return mode

    def _hint(self, given: ControlConditions) -> Tensor:
        """(tokens, channels) of the control image."""
        hint = to_device(given.hint, self.device).to(self.dtype)
        if self.repeats:
            side = int(self.net.config.patch_size)
            made = self.net.input_hint_block(hint[None])[0]
            lines, columns = made.shape[1] // side, made.shape[2] // side
            made = made.reshape(-1, lines, side, columns, side).permute(1, 3, 0, 2, 4)
            hint = made.reshape(lines * columns, -1)
        return self.check_hint(hint, given.grid, self.net.controlnet_x_embedder.in_features)
