"""Sets of LoRAs as values, and which tokens of a batch each set changes.

A LoRA changes a layer's weight by ``up @ down``: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021.
The weight stays as it is: what the set of a sequence makes of its tokens is added to what the layer makes of all. The
LoRAs of one sequence are one product, their ranks side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

DOWN: Final = ".down"
UP: Final = ".up"
"""Ends of names in a canonical file: of the two tensors of a module."""
TEXT_ENCODER: Final = "text_encoder"
"""Beginning of names in a canonical file: of modules that are not the denoising network's."""


class LowRankFactors(NamedTuple):
    """The change of one module's weight, ``up @ down``."""

    down: Tensor
    """(rank, in_features); of a convolution (rank, in_channels, height, width)"""
    up: Tensor
    """(out_features, rank), scales folded in; of a convolution (out_channels, rank, 1, 1)"""

    def rows(self, outputs: slice) -> LowRankFactors:
        """Those of some of the outputs."""
        return LowRankFactors(self.down, self.up[outputs])


class SequenceLoras:
    """The LoRAs of a sequence, by path of a module in the denoising network.

    Compared by identity: sequences of equal sets have one object, whose `name` tells the set.
    """

    def __init__(self, name: str, modules: Mapping[str, LowRankFactors]) -> None:
        self.name = name
        self._modules = dict(modules)

    def factors(self, path: str) -> LowRankFactors | None:
        """Those of a module; None where the set leaves it as it is."""
        return self._modules.get(path)

    @property
    def paths(self) -> tuple[str, ...]:
        """All modules that it changes."""
        return tuple(self._modules)

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max((len(factors.down) for factors in self._modules.values()), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All factors."""
        return tuple(part for factors in self._modules.values() for part in factors)


def low_rank(name: str, loras: Sequence[tuple[Mapping[str, Tensor], float]]) -> SequenceLoras:
    """The set of some LoRAs, each with its scale: ranks side by side, scales folded in.

    A LoRA is the tensors of its canonical file on one device and of one dtype: ``<path>.down``, ``<path>.up``. Those of
    text encoders are left out. The factors of a single LoRA at scale 1 are its tensors, not copies.
    """
    found: dict[str, list[LowRankFactors]] = {}
    for tensors, scale in loras:
        for key, down in tensors.items():
            if key.endswith(DOWN) and not key.startswith(TEXT_ENCODER):
                path = key.removesuffix(DOWN)
                up = tensors[path + UP]
                found.setdefault(path, []).append(LowRankFactors(down, up if scale == 1.0 else up * scale))
    return SequenceLoras(name, {path: _side_by_side(parts) for path, parts in found.items()})


def _side_by_side(parts: Sequence[LowRankFactors]) -> LowRankFactors:
    if len(parts) == 1:
        return parts[0]
    downs, ups = zip(*parts, strict=True)
    return LowRankFactors(torch.cat(downs), torch.cat(ups, dim=1))


class LoraSpan(NamedTuple):
    """Neighbours in a packed tensor that one set changes."""

    low_rank: SequenceLoras
    start: int
    end: int


class LoraSpans(NamedTuple):
    """What sets change of a packed tensor; what no span holds stays as it is."""

    of: tuple[LoraSpan, ...]
    units: int
    """What bounds count: all of the tensor's units. A unit may be a token, or the cells of a tile."""


class BatchLoras:
    """The set of each sequence of a batch; None for a sequence without one."""

    def __init__(self, low_ranks: Sequence[SequenceLoras | None]) -> None:
        self._low_ranks = tuple(low_ranks)
        self._spans: dict[tuple[tuple[int, ...], tuple[int, ...] | None], LoraSpans] = {}

    def __bool__(self) -> bool:
        return any(each is not None for each in self._low_ranks)

    def of(self, sequence: int) -> SequenceLoras | None:
        """The set of one sequence."""
        return self._low_ranks[sequence] if self._low_ranks else None

    def over(self, lengths: tuple[int, ...], of: tuple[int, ...] | None = None) -> LoraSpans:
        """Where sets act on a tensor that is packed by sequence, so many units of each, all sequences or those `of`.

        Neighbours of one set are one span.
        """
        key = lengths, of
        if key not in self._spans:
            low_ranks = self._low_ranks if of is None else [self._low_ranks[sequence] for sequence in of]
            self._spans[key] = _spans(low_ranks, lengths)
        return self._spans[key]


def _spans(low_ranks: Sequence[SequenceLoras | None], lengths: Sequence[int]) -> LoraSpans:
    bounds = pairwise(accumulate(lengths, initial=0))
    some = [(each, *of) for each, of in zip(low_ranks, bounds, strict=True) if of[0] < of[1]]
    spans = []
    for _, group in groupby(some, key=lambda part: id(part[0])):
        parts = list(group)
        low_rank = parts[0][0]
        if low_rank is not None:
            spans.append(LoraSpan(low_rank, parts[0][1], parts[-1][2]))
    return LoraSpans(tuple(spans), sum(lengths))


def whole(low_rank: SequenceLoras) -> LoraSpans:
    """Where a set acts on a tensor that belongs to one sequence: everywhere."""
    return LoraSpans((LoraSpan(low_rank, 0, 1),), 1)
