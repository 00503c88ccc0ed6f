"""What a denoiser and the ControlNet service ask of a loaded ControlNet, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.controlnets import ControlBase


@dataclass(frozen=True, eq=False)
class ControlText:
    """The text of one sequence, as the denoising network has it."""

    embeds: Tensor
    """(text_tokens, text_channels)"""
    pooled: Tensor | None = None
    """(pooled_channels,); None for Stable Diffusion 1 and 2."""
    time_ids: Tensor | None = None
    """(6,) sizes of SDXL's micro-conditioning; None for other models."""
    guidance_scale: float = 0.0
    """Distilled guidance; read where the ControlNet embeds it."""


@dataclass(frozen=True, eq=False)
class ControlConditions:
    """What a ControlNet sees of one row in all of its steps."""

    hint: Tensor
    """The control image as the ControlNet's card tells: latents packed as the picture's, (tokens, channels), or
    pixels, (3, height, width)."""
    grid: tuple[int, int]
    """Height and width of the picture in tokens."""
    texts: tuple[ControlText, ...]
    """Texts of the row's sequences: the prompt and, with classifier-free guidance, the negative prompt."""
    times: Tensor
    """(steps,) what the network is told of each step: timesteps, 0 to 1000."""
    mode: int | None = None
    """Which kind of control image it is, for a union ControlNet; None for others."""


@dataclass(frozen=True, eq=False)
class ControlSequenceStep:
    """The next step of one sequence of a row."""

    opened: object
    """What :meth:`ControlNet.open` made of the row."""
    step: int
    latents: Tensor
    """(tokens, channels): those of the whole picture, as the network sees them, without what an inpainting model is
    given beside them."""
    sequence: int = 0
    """Which of the row's sequences."""


class ControlNet(Protocol):
    """A loaded ControlNet."""

    net: Any
    """Diffusers' module."""
    card: ControlCard
    device: torch.device
    dtype: torch.dtype

    def behind(self, base: ControlBase) -> tuple[int | None, ...]:
        """By block of a denoising network, which of its samples is added behind it; None for nothing.

        Raises:
            ControlMismatch: its samples do not fit the network, or the network's latents and texts do not fit it.
        """

    def work(self, base: ControlBase) -> ControlWork:
        """What it computes in one step beside a denoising network that it fits."""

    def open(self, conditions: ControlConditions) -> object:
        """Compute what all steps of a row share.

        Raises:
            ControlMismatch: the control image or the text is not of the shape that it takes; or a mode is missing,
                unknown, or not taken.
        """

    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """Its samples in order, as they are computed: by item (tokens, channels), unscaled."""
