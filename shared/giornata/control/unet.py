"""`ControlNetModel` of Stable Diffusion 1 and 2 and SDXL: pictures of one size share a forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from giornata.control.expansion import Behind
from giornata.control.naming import ControlMismatch, check_fits
from giornata.control.networks import ControlConditions, ControlSequenceStep, ControlText
from giornata.control.operations import skip_channels, unet_work
from giornata.packed.packing import maps_to_tiles, tiles_to_maps, to_device
from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.controlnets import ControlBase

TIME_IDS: Final = 6
"""Sizes of SDXL's micro-conditioning."""


@dataclass(frozen=True, eq=False)
class UnetControlSession:
    """The tensors that all steps of one row share, on the device."""

    hint: Tensor
    """(channels, height, width): the control image's embedding."""
    grid: tuple[int, int]
    texts: tuple[ControlText, ...]
    times: Tensor
    """(steps,)"""


class UnetControl:
    """A loaded ControlNet of a UNet; satisfies :class:`giornata.control.networks.ControlNet`.

    Latents are (tiles, channels * side²), without an inpainting model's further channels.
    """

    def __init__(self, net: ControlNetModel, card: ControlCard) -> None:
        self.net: Any = net
        self.card = card
        self.device: torch.device = net.device
        self.dtype: torch.dtype = net.dtype
        self.samples = len(self.net.controlnet_down_blocks) + 1
        """How many it makes: one of each skip connection, and one of the middle."""
        # The control image is embedded once for all steps: a forward is given the embedding, in place of pixels.
        self._embedding: nn.Module = self.net.controlnet_cond_embedding
        self._reversed = net.config.controlnet_conditioning_channel_order == "bgr"
        self.net.controlnet_cond_embedding = nn.Identity()
        self.net.register_to_config(controlnet_conditioning_channel_order="rgb")

    def behind(self, base: ControlBase) -> Behind:
        """See :meth:`giornata.control.networks.ControlNet.behind`."""
        config = self.net.config
        side = self._side(base)
        pooled = None
        if config.addition_embed_type is not None:
            sizes = TIME_IDS * int(config.addition_time_embed_dim)
            pooled = int(config.projection_class_embeddings_input_dim) - sizes
        check_fits(
            self.card,
            base,
            ("channels of latents", int(config.in_channels) * side**2, base.latent_channels),
            ("width of text", int(config.cross_attention_dim), base.text_channels),
            ("width of pooled text", pooled, base.pooled_channels),
            ("pixels of a token", side * self._hint_pixels, base.token_pixels),
            ("skip connections", skip_channels(self.net, side), base.channels),
        )
        return tuple(range(self.samples))

    def work(self, base: ControlBase) -> ControlWork:
        """See :meth:`giornata.control.networks.ControlNet.work`."""
        return unet_work(self.net, self._side(base))

    def _side(self, base: ControlBase) -> int:
        """Latent pixels a side of a token."""
        return math.isqrt(base.latent_channels // int(self.net.config.in_channels))

    @property
    def _hint_pixels(self) -> int:
        """Pixels of the control image a side of one of its embedding's."""
        return math.prod(conv.stride[0] for conv in self._embedding.modules() if isinstance(conv, nn.Conv2d))

    @torch.inference_mode()
    def open(self, conditions: ControlConditions) -> UnetControlSession:
        """See :meth:`giornata.control.networks.ControlNet.open`."""
        self._check(conditions)
        pixels = to_device(conditions.hint, self.device).to(self.dtype)
        if self._reversed:
            pixels = pixels.flip(0)
        return UnetControlSession(
            self._embedding(pixels[None])[0],
            conditions.grid,
            tuple(self._text(text) for text in conditions.texts),
            to_device(conditions.times, self.device),
        )

    @torch.inference_mode()
    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """See :meth:`giornata.control.networks.ControlNet.run`: items of one size and text length are one forward."""
        groups: dict[tuple[tuple[int, int], int, int], list[int]] = {}
        for index, item in enumerate(items):
            key = _of(item).grid, item.latents.shape[1], len(_text_of(item).embeds)
            groups.setdefault(key, []).append(index)
        made: dict[int, list[Tensor]] = {}
        for (grid, *_), of in groups.items():
            maps = self._forward([items[index] for index in of], grid)
            tokens = [maps_to_tiles(one, grid).flatten(2) for one in maps]
            made |= {index: [sample[place] for sample in tokens] for place, index in enumerate(of)}
        for nth in range(self.samples):
            yield tuple(made[index][nth] for index in range(len(items)))

    def _forward(self, items: Sequence[ControlSequenceStep], grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """(items, channels, height, width) of each sample."""
        channels = int(self.net.config.in_channels)
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
            torch.stack([_of(item).times[item.step] for item in items]),
            torch.stack([each.embeds for each in texts]),
            controlnet_cond=torch.stack([_of(item).hint for item in items]),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return (*skips, middle)

    def _text(self, text: ControlText) -> ControlText:
        parts = (text.embeds, text.pooled, text.time_ids)
        return ControlText(*(None if part is None else to_device(part, self.device) for part in parts))  # type: ignore[arg-type]  # embeds stays a tensor

    def _check(self, given: ControlConditions) -> None:
        width, called = int(self.net.config.cross_attention_dim), f"the ControlNet {self.card.name}"
        for text in given.texts:
            if text.embeds.shape[-1] != width:
                raise ControlMismatch(
                    f"{called} takes text embeddings of width {width}, and the model has {text.embeds.shape[-1]}"
                )
            sized = text.pooled is not None and text.time_ids is not None
            if self.net.config.addition_embed_type is not None and not sized:
                raise ControlMismatch(
                    f"{called} is one of SDXL, and the model's text has no pooled embedding"
                )
        if given.hint.dim() != 3 or given.hint.shape[0] != 3:
            raise ControlMismatch(
                f"{called} takes a control image of (3, height, width), and was given {tuple(given.hint.shape)}"
            )


def _of(item: ControlSequenceStep) -> UnetControlSession:
    return cast("UnetControlSession", item.opened)


def _text_of(item: ControlSequenceStep) -> ControlText:
    return _of(item).texts[item.sequence]
