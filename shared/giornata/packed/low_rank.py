"""Sets of LoRAs over packed sequences: factors, their products, and hooks on unmodified layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn

# Sets of LoRAs as values, and which tokens of a batch each set changes.
#
# A LoRA changes a layer's weight by ``up @ down``: "LoRA: Low-Rank Adaptation of Large Language Models", Hu
# et al., 2021. The weight stays as it is: what the set of a sequence makes of its tokens is added to what
# the layer makes of all. The LoRAs of one sequence are one product, their ranks side by side.


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
        """Return those of some of the outputs."""
        return LowRankFactors(self.down, self.up[outputs])


@dataclass(frozen=True, eq=False)
class SequenceLoras:
    """The LoRAs of a sequence, by path of a module in the denoising network.

    Compared by identity: sequences of equal sets have one object, whose `name` tells the set.
    """

    name: str
    modules: Mapping[str, LowRankFactors]

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max((len(factors.down) for factors in self.modules.values()), default=0)

    def to(self, device: torch.device) -> SequenceLoras:
        """The same on `device`."""
        modules = {
            path: LowRankFactors(*(part.to(device) for part in each)) for path, each in self.modules.items()
        }
        return SequenceLoras(self.name, modules)

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(part.nbytes for part in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All factors."""
        return tuple(part for factors in self.modules.values() for part in factors)


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
    """The changes of LoRA sets to a packed tensor; what no span holds stays as it is."""

    of: tuple[LoraSpan, ...]
    units: int
    """What bounds count: all of the tensor's units. A unit may be a token, or the cells of a tile."""


class BatchLoras:
    """The set of each sequence of a batch; None for a sequence without one."""

    def __init__(self, low_ranks: Sequence[SequenceLoras | None]) -> None:
        self._low_ranks = tuple(low_ranks)
        self._act = self._low_ranks.count(None) < len(self._low_ranks)
        self._spans: dict[tuple[tuple[int, ...], tuple[int, ...] | None], LoraSpans] = {}

    def __bool__(self) -> bool:
        return self._act

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


# Products of low-rank factors with the tokens that they act on, added to what a layer has made of these
# tokens.


class FactorSpan(NamedTuple):
    """Factors of a module, and what they act on."""

    factors: LowRankFactors
    start: int
    end: int
    """Rows of what enters a linear layer, items of what enters a convolution."""


def add_products(entering: Tensor, leaving: Tensor, parts: Sequence[FactorSpan]) -> None:
    """Add ``up (down x)`` of each span: of what enters a linear layer to what leaves it, which may be some columns.

    `entering` is (rows, in_features), `leaving` (rows, out_features).
    """
    for factors, start, end in parts:
        low = entering[start:end] @ factors.down.flatten(1).t()
        leaving[start:end].addmm_(low, factors.up.flatten(1).t())


def convolve(
    entering: Tensor,
    leaving: Tensor,
    parts: Sequence[FactorSpan],
    module: nn.Conv2d,
    *,
    padding: int | None = None,
) -> None:
    """The same for the convolution `module`: (items, channels, height, width) each; its own padding or another."""
    around = module.padding if padding is None else padding
    for factors, start, end in parts:
        low = F.conv2d(entering[start:end], factors.down, None, module.stride, around, module.dilation)
        leaving[start:end] += F.conv2d(low, factors.up)


# Low-rank changes of an unmodified network: hooks that add to what its layers make what the sets of a batch
# make.
#
# Which tokens a layer sees follows from its path and from where the forward is, which tells the hooks.


Where = Callable[[str], LoraSpans]
"""What sets change of the tensor that enters the module of this path now."""
_OF_TEXT: Final = re.compile(r"(^|\.)(add_[qkv]_proj|to_add_out|\w*_context|context_embedder|txt_\w+)(\.|$)")


def is_text_layer(path: str) -> bool:
    """Return whether a layer of a transformer with two streams sees the text's, by diffusers' names."""
    return _OF_TEXT.search(path) is not None


class LowRankHooks:
    """The hooks of one network, on all of its linear layers and convolutions but those `apart`.

    What is called otherwise than as a module asks for :meth:`add` or :meth:`parts` itself. Not thread-safe: one forward
    at a time. Hooks are set when the first set acts, so that a network without LoRAs is called as it is.
    """

    def __init__(self, network: nn.Module, apart: Collection[nn.Module] = ()) -> None:
        self._paths: dict[nn.Module, str] = {
            module: path
            for path, module in network.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv2d))
        }
        self._hooked = [module for module in self._paths if module not in set(apart)]
        self._attached = False
        self._where: Where | None = None

    @property
    def layers(self) -> dict[str, nn.Module]:
        """All layers that sets may change, by path."""
        return {path: module for module, path in self._paths.items()}

    def paths_in(self, part: nn.Module) -> tuple[str, ...]:
        """Paths of the layers of a part of the network, as far as sets may change them."""
        return tuple(self._paths[module] for module in part.modules() if module in self._paths)

    @contextmanager
    def acting(self, where: Where | None) -> Iterator[None]:
        """Let sets act as `where` tells; None for none. What acted before acts again afterwards."""
        if where is not None and not self._attached:
            self._attach()
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def alone(self, low_rank: SequenceLoras | None) -> Any:
        """:meth:`acting` on all that enters any layer: it belongs to one sequence."""
        return self.acting(None if low_rank is None else lambda _: LoraSpans((LoraSpan(low_rank, 0, 1),), 1))

    def parts(self, module: nn.Module, rows: int) -> list[FactorSpan]:
        """Return what acts now on so many `rows`, or items, that enter `module`.

        Raises:
            ValueError: the rows are not those of the batch.
        """
        if self._where is None:
            return []
        path = self._paths[module]
        spans, units = self._where(path)
        if not spans:
            return []
        each, rest = divmod(rows, units)
        if rest:
            raise ValueError(f"{path} received {rows} rows, expected a multiple of {units}")
        return [
            FactorSpan(factors, start * each, end * each)
            for low_rank, start, end in spans
            if (factors := low_rank.modules.get(path)) is not None
        ]

    def add(self, module: nn.Module, entering: Tensor, leaving: Tensor, outputs: slice = slice(None)) -> None:
        """Add, in place, what acts now to what a linear layer, or one called as such, makes of `entering`.

        Both are (..., channels); `leaving` may be some `outputs` of the layer alone.
        """
        if self._where is None:
            return
        entering = entering.reshape(-1, entering.shape[-1])
        parts = self.parts(module, len(entering))
        if outputs != slice(None):
            parts = [part._replace(factors=part.factors.rows(outputs)) for part in parts]
        if parts:
            add_products(entering, leaving.view(-1, leaving.shape[-1]), parts)

    def _attach(self) -> None:
        for module in self._hooked:
            hook = self._convolution if isinstance(module, nn.Conv2d) else self._linear
            module.register_forward_hook(hook)
        self._attached = True

    def _linear(self, module: nn.Module, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
        self.add(module, entering[0], leaving)

    def _convolution(self, module: nn.Conv2d, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
        convolve(entering[0], leaving, self.parts(module, len(leaving)), module)
