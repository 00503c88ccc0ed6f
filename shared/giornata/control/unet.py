"""`ControlNetModel` of Stable Diffusion 1 and 2 and SDXL: pictures of one size share a forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from giornata.control.loading import loaded
from giornata.control.mismatch import ControlMismatch
from giornata.packed.moving import moved
from giornata.packed.tiles import joined, parted
from giornata.wire.adapters import ControlCard, ControlKind


@dataclass(frozen=True, eq=False)
class Words:
    """The text of one sequence."""

    embeds: Tensor
    """(text_tokens, cross_attention_dim)"""
    pooled: Tensor | None = None
    """(pooled_dim,); None for Stable Diffusion 1 and 2."""
    time_ids: Tensor | None = None
    """(6,) sizes of SDXL's micro-conditioning, as `pooled`."""


@dataclass(frozen=True, eq=False)
class Conditions:
    """What a ControlNet sees of one row in all of its steps."""

    hint: Tensor
    """The control image in 0 to 1, (3, height, width)."""
    grid: tuple[int, int]
    """Height and width of the picture in tiles."""
    words: tuple[Words, ...]
    """The texts of the row's sequences: of the prompt and, with guidance, of the negative prompt."""
    times: Tensor
    """(steps,) timesteps."""


@dataclass(frozen=True, eq=False)
class Opened:
    """What all steps of one row share, on the device."""

    hint: Tensor
    """(channels, height, width): the control image's embedding."""
    grid: tuple[int, int]
    words: tuple[Words, ...]
    times: Tensor
    """(steps,)"""


@dataclass(frozen=True, eq=False)
class Item:
    """The next step of one sequence of a row."""

    opened: Opened
    step: int
    latents: Tensor
    """(tiles, channels * side²): those of the whole picture, as the network sees them, without an inpainting model's
    further channels."""
    sequence: int = 0
    """Which of the row's sequences."""

    @property
    def words(self) -> Words:
        """The sequence's."""
        return self.opened.words[self.sequence]


class UnetControl:
    """A loaded ControlNet of a UNet."""

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

    @torch.inference_mode()
    def open(self, conditions: Conditions) -> Opened:
        """Compute what all steps of a row share.

        Raises:
            ControlMismatch: the text is not as wide as the ControlNet takes it, lacks SDXL's pooled embedding and
                sizes, or the control image has not three channels.
        """
        self._check(conditions)
        pixels = moved(conditions.hint, self.device).to(self.dtype)
        if self._reversed:
            pixels = pixels.flip(0)
        return Opened(
            self._embedding(pixels[None])[0],
            conditions.grid,
            tuple(self._words(words) for words in conditions.words),
            moved(conditions.times, self.device),
        )

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> Iterator[tuple[Tensor, ...]]:
        """What it adds, sample by sample: by item (tiles, channels * side²), unscaled; the middle's is the last.

        Items of one size and text length are one forward.
        """
        groups: dict[tuple[tuple[int, int], int, int], list[int]] = {}
        for index, item in enumerate(items):
            key = item.opened.grid, item.latents.shape[1], len(item.words.embeds)
            groups.setdefault(key, []).append(index)
        made: dict[int, list[Tensor]] = {}
        for (grid, *_), of in groups.items():
            maps = self._forward([items[index] for index in of], grid)
            tokens = [parted(one, grid).flatten(2) for one in maps]
            made |= {index: [sample[place] for sample in tokens] for place, index in enumerate(of)}
        for nth in range(self.samples):
            yield tuple(made[index][nth] for index in range(len(items)))

    def _forward(self, items: Sequence[Item], grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """(items, channels, height, width) of each sample."""
        channels = int(self.net.config.in_channels)
        latents = torch.stack([item.latents for item in items])
        side = math.isqrt(latents.shape[2] // channels)
        sample = joined(latents.view(*latents.shape[:2], channels, side, side), grid)
        words = [item.words for item in items]
        added = None
        if self.net.config.addition_embed_type is not None:
            pooled, sizes = (
                torch.stack([part for each in words if (part := getattr(each, name)) is not None])
                for name in ("pooled", "time_ids")
            )
            added = {"text_embeds": pooled, "time_ids": sizes}
        skips, middle = self.net(
            sample,
            torch.stack([item.opened.times[item.step] for item in items]),
            torch.stack([each.embeds for each in words]),
            controlnet_cond=torch.stack([item.opened.hint for item in items]),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return (*skips, middle)

    def _words(self, words: Words) -> Words:
        parts = (words.embeds, words.pooled, words.time_ids)
        return Words(*(None if part is None else moved(part, self.device) for part in parts))  # type: ignore[arg-type]  # embeds stays a tensor

    def _check(self, given: Conditions) -> None:
        width, called = int(self.net.config.cross_attention_dim), f"the ControlNet {self.card.name}"
        for words in given.words:
            if words.embeds.shape[-1] != width:
                raise ControlMismatch(
                    f"{called} takes text embeddings of width {width}, and the model has {words.embeds.shape[-1]}"
                )
            sized = words.pooled is not None and words.time_ids is not None
            if self.net.config.addition_embed_type is not None and not sized:
                raise ControlMismatch(
                    f"{called} is one of SDXL, and the model's text has no pooled embedding"
                )
        if given.hint.dim() != 3 or given.hint.shape[0] != 3:
            raise ControlMismatch(
                f"{called} takes a control image of (3, height, width), and was given {tuple(given.hint.shape)}"
            )


def load(folder: Path, dtype: torch.dtype, device: torch.device, name: str | None = None) -> UnetControl:
    """The ControlNet in `folder`; requests call it `name`, by default the folder's. Safetensors alone are read.

    Raises:
        ValueError: it is none of a UNet, or one that is not served; says why.
    """
    return UnetControl(*loaded(ControlKind.UNET, folder, dtype, device, name))
