"""The prefix of a block-causal sequence: tokens that attend among themselves alone, computed once for all steps.

Text of Qwen-Image 2.1 and references of Flux.2 Klein-KV are modulated as at timestep 0 and never see the picture that
is denoised, so that no step changes them. Their keys and values are made when a row joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from giornata.packed.attention import Attention, Beside, DenseKV
from giornata.packed.packing import Segments, layout
from giornata.packed.region import PackedBatch, Rotary
from giornata.packed.uses import BlockInputs
from giornata_denoiser.families.driven.forward import ForwardContext, Prefilled


@dataclass(frozen=True, eq=False)
class Prefix:
    """What the blocks compute of one sequence before its first step, as an image stream without text."""

    stream: Tensor
    """(tokens, channels): what enters the first block."""
    rotary: Rotary
    """Rotary embedding of the tokens."""
    attend: Attention
    """How they attend to each other."""

    def forward(self, vectors: Tensor, kept: PrefixKeysValues) -> ForwardContext:
        """The forward that has the blocks fill `kept`; `vectors`, (1, width), are the modulation of timestep 0."""
        tokens = len(self.stream)
        sequences = PackedBatch(layout([0], [tokens], self.stream.device), self.rotary, (None,))
        return ForwardContext(
            sequences, vectors, (BlockInputs(recorder=kept),), self.attend, sequences.layout.image
        )


class PrefixKeysValues:
    """Keeps what the blocks show of a prefix; a :class:`giornata.packed.uses.ActivationRecorder`."""

    def __init__(self) -> None:
        self._kept: list[DenseKV] = []

    @property
    def prefilled(self) -> Prefilled:
        """By block, in the order in which they ran."""
        return tuple(self._kept)

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nothing is kept of a block's input."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:  # noqa: ARG002 - they come in order
        """(tokens, heads, head_dim) each; copied, since they may be views of more."""
        self._kept.append(DenseKV(key.clone(), value.clone()))

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """No other part is kept."""


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Segments,  # noqa: ARG001 - see `Attention`; a prefix is one sequence
    outside: Mapping[int, Beside],  # noqa: ARG001 - likewise: nothing lies outside of it
) -> Tensor:
    """Attention of one sequence's tokens to themselves and those before them; see `giornata.packed.attention`."""
    query, key, value = (each.unsqueeze(0).transpose(1, 2) for each in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2)[0]


def empty_text(stream: Tensor) -> Tensor:
    """(0, channels): no text beside the image stream (tokens, channels)."""
    return torch.empty(0, stream.shape[1], dtype=stream.dtype, device=stream.device)
