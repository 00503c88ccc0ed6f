"""adaLN modulation of packed tokens: one set of vectors for each sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from giornata.packed.packing import Segments

Modulation = tuple[Tensor, ...]
"""adaLN vectors, (sequences, inner_dim) each."""


class PerToken:
    """Applies vectors of sequences to the packed tokens of these sequences.

    A CPU computes each sequence by itself; a GPU gathers a vector for every token, in one kernel.

    Args:
        vectors: (sequences, inner_dim) each: shift, scale and gate, once or twice.
        segments: the tokens of each sequence.
    """

    def __init__(self, vectors: Modulation, segments: Segments) -> None:
        self._vectors, self._segments = vectors, segments

    def modulated(self, normed: Tensor, first: int) -> Tensor:
        """normed * (1 + scale) + shift, (tokens, inner_dim), by the vectors from `first` on."""
        shift, scale = self._vectors[first : first + 2]
        return self._each(self._each(normed, 1 + scale, torch.mul), shift, torch.add)

    def times(self, values: Tensor, which: int) -> Tensor:
        """values * vector `which`, (tokens, inner_dim)."""
        return self._each(values, self._vectors[which], torch.mul)

    def _each(self, values: Tensor, vectors: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        if len(vectors) == 1:
            return combine(values, vectors)
        if values.device.type != "cpu":
            return combine(values, vectors.index_select(0, self._segments.sequence))
        out = torch.empty_like(values)
        for vector, (start, end) in zip(vectors, self._segments.bounds, strict=True):
            combine(values[start:end], vector, out=out[start:end])
        return out
