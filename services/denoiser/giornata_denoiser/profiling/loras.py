"""LoRAs to measure steps with: random factors of every linear layer, whose sizes matter and whose values do not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn

from giornata.packed.low_rank import DOWN, UP, SequenceLoras, low_rank
from giornata_denoiser.engine.rehearsal import RANK

SIZE: Final = 1e-3
"""Standard deviation of factors: small beside a network's own weights."""


class RandomLoras:
    """Sets of one LoRA each, by number from 1, for the linear `layers` of a network, by path.

    Factors are of the layers' device and dtype. A set is made when it is first asked for, and kept.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
        self._made: dict[int, SequenceLoras] = {}

    @cached_property
    def weights(self) -> float:
        """Weights in the factors of one set, as `SequenceShape.low_rank` counts them."""
        return float(sum(RANK * (layer.in_features + layer.out_features) for layer in self._layers.values()))

    def set_of(self, number: int) -> SequenceLoras | None:
        """The set of this number; None for 0, which is no set."""
        if number and number not in self._made:
            self._made[number] = low_rank(f"random {number}", [(self._tensors(number), 1.0)])
        return self._made.get(number)

    def _tensors(self, number: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(number)
        return {
            path + end: (SIZE * torch.randn(*shape, generator=chance)).to(layer.weight)
            for path, layer in self._layers.items()
            for end, shape in ((DOWN, (RANK, layer.in_features)), (UP, (layer.out_features, RANK)))
        }
