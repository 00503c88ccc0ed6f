"""The prompts of a driven transformer: the tensors of their encodings, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from giornata.packed.packing import to_device
from giornata.wire.errors import InvalidField

EMBEDS = "prompt_embeds"


@dataclass(frozen=True, eq=False)
class DrivenPrompt:
    """One sequence's prompt; satisfies :class:`giornata_denoiser.rows.row.Prompt`."""

    tensors: Mapping[str, Tensor]
    """By name: `prompt_embeds` (text_tokens, channels), and what else the transformer takes."""
    grid: tuple[int, int]
    """Height and width of the picture in tokens: positions of text may follow from it."""
    guidance_scale: float
    """Distilled guidance; read only where the transformer embeds it."""
    joint_tokens: int
    """Text tokens that pass the blocks in each step: its own, and those that the transformer pads them with."""

    prefix_tokens: int = 0
    """Tokens of the encoding that attend among themselves alone, and come before all others: not joint ones."""

    @property
    def padding_tokens(self) -> int:
        """None is kept: what pads a prompt here attends, or was left out."""
        return 0

    @property
    def embeds(self) -> Tensor:
        """The encoding's tokens, (text_tokens, channels)."""
        return self.tensors[EMBEDS]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> DrivenPrompt:
        """The same prompt on `device`; itself where it is there."""
        if self.embeds.device == device:
            return self
        return replace(
            self, tensors={name: to_device(tensor, device) for name, tensor in self.tensors.items()}
        )


@dataclass(frozen=True)
class DrivenPromptBuilder:
    """A builder of prompts' tensors; satisfies :class:`giornata_denoiser.families.protocol.PromptBuilder`."""

    tensors: Mapping[str, tuple[int | None, ...]]
    multiple: int = 1
    """The transformer pads text to a multiple of so many tokens, which attend."""
    largest: int | None = None
    """Most tokens a side of a picture that the transformer has positions for; None for any."""
    causal: bool = False
    """Whether text attends among itself alone: all of it is a prefix."""

    def prompt(
        self, tensors: Mapping[str, Tensor], grid: tuple[int, int], guidance_scale: float
    ) -> DrivenPrompt:
        """All tensors as they are.

        Raises:
            InvalidField: the picture has no positions.
        """
        if self.largest is not None and max(grid) > self.largest:
            raise InvalidField(
                "The picture is larger than the model has positions for.",
                field="size",
                received=f"{grid[1]}x{grid[0]} tokens",
                accepted=f"at most {self.largest} tokens a side",
            )
        tokens = len(tensors[EMBEDS])
        if self.causal:
            return DrivenPrompt(tensors, grid, guidance_scale, joint_tokens=0, prefix_tokens=tokens)
        return DrivenPrompt(tensors, grid, guidance_scale, tokens + -tokens % self.multiple)
