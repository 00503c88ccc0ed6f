"""adaLN vectors of all steps of a sequence, each linear layer applied once: they depend on prompt and time alone.

Computed step by step, a batch of one row reads the weights of these layers, a quarter of all, for a few vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Vectors = tuple[Tensor, ...]
"""Modulation vectors of one adaLN layer, (sequences, inner_dim) each."""


def prepared(transformer: Any, conditioning: Tensor) -> Tensor:
    """(steps, vectors * inner_dim): the vectors of all layers, in the order in which :class:`Modulation` reads them.

    `conditioning`, (steps, inner_dim), is what the transformer embeds of prompt and time.
    """
    activated = torch.nn.functional.silu(conditioning)
    return torch.cat([layer(activated) for layer in _layers(transformer)], dim=1)


def prepared_channels(transformer: Any) -> int:
    """The width of :func:`prepared`."""
    return sum(layer.out_features for layer in _layers(transformer))


class Modulation:
    """The vectors of one forward, by layer.

    `of` are :func:`prepared` of each sequence, `steps` the step that each sequence makes.
    """

    def __init__(self, transformer: Any, of: Sequence[Tensor], steps: Sequence[int]) -> None:
        picked = [vectors[step : step + 1] for vectors, step in zip(of, steps, strict=True)]
        packed = picked[0] if len(picked) == 1 else torch.cat(picked)
        self._parts = torch.split(packed, [layer.out_features for layer in _layers(transformer)], dim=1)
        self._doubles = len(transformer.transformer_blocks)

    def double(self, block: int) -> tuple[Vectors, Vectors]:
        """Shift, scale and gate of the attention, then of the feed-forward: of the image and of the text stream."""
        image, text = self._parts[2 * block : 2 * block + 2]
        return image.chunk(6, dim=1), text.chunk(6, dim=1)

    def single(self, block: int) -> Vectors:
        """Shift, scale and gate; `block` counts double blocks too."""
        return self._parts[self._doubles + block].chunk(3, dim=1)

    def output(self) -> Vectors:
        """Shift and scale of the last norm."""
        scale, shift = self._parts[-1].chunk(2, dim=1)
        return shift, scale


def _layers(transformer: Any) -> list[Any]:
    """The linear layers of all adaLN norms, in the order of the forward."""
    doubles = [
        norm.linear for block in transformer.transformer_blocks for norm in (block.norm1, block.norm1_context)
    ]
    singles = [block.norm.linear for block in transformer.single_transformer_blocks]
    last = getattr(transformer, "norm_out", None)  # of a ControlNet nothing follows the last block
    return [*doubles, *singles, *([] if last is None else [last.linear])]
