"""adaLN modulation of packed tokens: one set of vectors for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Modulation = tuple[Tensor, ...]
"""adaLN vectors, (sequences, inner_dim) each."""


class PerToken:
    """Vectors of sequences, as the packed tokens of these sequences meet them.

    On a CPU each sequence's tokens are taken by themselves; a GPU gathers a vector for every token, in one kernel.

    Args:
        vectors: (sequences, inner_dim) each: shift, scale and gate, once or twice.
        lengths: tokens of each sequence.
        sequence: (tokens,) int64: which one each token belongs to.
    """

    def __init__(self, vectors: Modulation, lengths: Sequence[int], sequence: Tensor) -> None:
        self._vectors, self._lengths, self._sequence = vectors, lengths, sequence

    def modulated(self, normed: Tensor, first: int) -> Tensor:
        """normed * (1 + scale) + shift, (tokens, inner_dim), by the vectors from `first` on."""
        shift, scale = self._vectors[first : first + 2]
        return self._each(self._each(normed, 1 + scale, torch.mul), shift, torch.add)

    def times(self, values: Tensor, which: int) -> Tensor:
        """Of (tokens, inner_dim)."""
        return self._each(values, self._vectors[which], torch.mul)

    def _each(self, values: Tensor, vectors: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        if len(vectors) == 1:
            return combine(values, vectors)
        if values.device.type != "cpu":
            return combine(values, vectors.index_select(0, self._sequence))
        out = torch.empty_like(values)
        start = 0
        for vector, length in zip(vectors, self._lengths, strict=True):
            span = slice(start, start + length)
            combine(values[span], vector, out=out[span])
            start += length
        return out
