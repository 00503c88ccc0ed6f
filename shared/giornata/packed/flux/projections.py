"""Projections of one input as one product: query, key and value, and the MLP beside them in single blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn


class FusedLinear:
    """Linear layers of the same input, applied as one.

    Their weights are put into one tensor, and become views of it: nothing is kept twice, and each layer still works by
    itself. Whoever moves a layer elsewhere afterwards parts it from the others. Layers whose weights are no plain
    tensors, since they are quantised, are applied one after the other.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)
        self._weight: Tensor | None = None
        if any(type(layer.weight) not in {nn.Parameter, Tensor} for layer in layers):
            return
        self._widths = [layer.out_features for layer in layers]
        self._weight = torch.cat([layer.weight.detach() for layer in layers])
        self._bias = torch.cat([layer.bias.detach() for layer in layers])
        for layer, weight, bias in zip(
            layers,
            torch.split(self._weight, self._widths),
            torch.split(self._bias, self._widths),
            strict=True,
        ):
            layer.weight.data, layer.bias.data = weight, bias

    def __call__(self, entering: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes of `entering`, (tokens, in_features): views, (tokens, out_features) each."""
        if self._weight is None:
            return tuple(F.linear(entering, layer.weight, layer.bias) for layer in self.layers)
        return torch.split(F.linear(entering, self._weight, self._bias), self._widths, dim=1)


class FluxProjections:
    """The joined projections of every block of a `FluxTransformer2DModel`."""

    def __init__(self, transformer: Any) -> None:
        self.image = [
            FusedLinear((block.attn.to_q, block.attn.to_k, block.attn.to_v))
            for block in transformer.transformer_blocks
        ]
        """Query, key and value of double blocks."""
        self.text = [
            FusedLinear((block.attn.add_q_proj, block.attn.add_k_proj, block.attn.add_v_proj))
            for block in transformer.transformer_blocks
        ]
        """As `image`."""
        self.single = [
            FusedLinear((block.attn.to_q, block.attn.to_k, block.attn.to_v, block.proj_mlp))
            for block in transformer.single_transformer_blocks
        ]
        """Query, key, value and the MLP's first layer."""
