"""Sequence parallelism: processes trade tokens for heads before attention, and back after it.

Source: "DeepSpeed Ulysses", Jacobs et al. 2023, here over packed sequences of which every process has some tokens, with
one uneven all-to-all each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from giornata.packed.region import PackedBatch
from giornata.packed.shares import (
    BatchShard,
    BatchSharding,
    PictureShard,
    RankTokenOrder,
    Shard,
    spread,
    turned,
)
from giornata.packed.uses import BlockInputs, Residuals


class AllToAllGroup(Protocol):
    """A group of processes that compute one batch, as one of its members sees it."""

    @property
    def name(self) -> str:
        """Which group it is; no two that are made have one name."""

    @property
    def rank(self) -> int:
        """Its place among them."""

    @property
    def size(self) -> int:
        """How many they are."""

    def trade(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """One all-to-all, which every member calls alike.

        `flat`, (elements,), holds `sent` elements for each rank, one part behind the other. The result, as long as all
        of `received`, holds what each rank has sent to this one.
        """


class Ulysses:
    """One member's parts of the batches that a group computes together."""

    def __init__(self, exchange: AllToAllGroup) -> None:
        self._exchange = exchange
        self._parts: WeakKeyDictionary[PackedBatch, ShardedBatch] = WeakKeyDictionary()

    @property
    def share(self) -> Shard:
        """What this member has of anything."""
        return Shard(self._exchange.rank, self._exchange.size)

    def part(self, sequences: PackedBatch) -> ShardedBatch:
        """This member's part of a batch of `sequences`; kept while these are."""
        if sequences not in self._parts:
            self._parts[sequences] = ShardedBatch(self._exchange, sequences)
        return self._parts[sequences]


class ShardedBatch:
    """One member's part of a batch."""

    def __init__(self, exchange: AllToAllGroup, sequences: PackedBatch) -> None:
        self._exchange = exchange
        self.layout = sequences.layout
        """Layout of all tokens of the batch."""
        self.shares = BatchSharding(sequences, exchange.size)
        self.own: BatchShard = self.shares.of(sequences, exchange.rank)

    @property
    def sequences(self) -> PackedBatch:
        """What this member computes."""
        return self.own.sequences

    def uses(self, uses: Sequence[BlockInputs]) -> tuple[BlockInputs, ...]:
        """What this member's share of each sequence uses.

        Keys and values that are taken or recorded are of its heads, hidden states of its tokens.
        """
        if not uses:
            return ()
        return tuple(
            use if use.residuals is None else replace(use, residuals=ResidualShard(use.residuals, own))
            for use, own in zip(uses, self.own.pictures, strict=True)
        )

    def to_heads(self, order: RankTokenOrder, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(own_tokens, heads, head_dim) each → (tokens, own_heads, head_dim): all tokens of `order`, by sequence."""
        share, many = self._share, len(parts)
        own, heads, width = parts[0].shape
        spans = spread(heads, turned(share.size, 0))
        sent = [own * many * (span.stop - span.start) * width for span in spans]
        flat = parts[0].new_empty(sum(sent))
        for span, piece in zip(spans, torch.split(flat, sent), strict=True):
            torch.stack(
                [part[:, span] for part in parts],
                dim=1,
                out=piece.view(own, many, span.stop - span.start, width),
            )
        mine = spans[share.rank].stop - spans[share.rank].start
        got = self._exchange.trade(flat, sent, [count * many * mine * width for count in order.counts])
        return got.view(sum(order.counts), many, mine, width).index_select(0, order.by_sequence).unbind(1)

    def to_tokens(self, order: RankTokenOrder, attended: Tensor, heads: int) -> Tensor:
        """(tokens, own_heads, head_dim) → (own_tokens, heads, head_dim): the inverse of :meth:`to_heads`."""
        share, width = self._share, attended.shape[2]
        own, each = order.counts[share.rank], attended.shape[1] * width
        spans = spread(heads, turned(share.size, 0))
        received = [own * (span.stop - span.start) * width for span in spans]
        flat = attended.index_select(0, order.by_rank).flatten()
        got = self._exchange.trade(flat, [count * each for count in order.counts], received)
        parts = zip(torch.split(got, received), spans, strict=True)
        return torch.cat([part.view(own, span.stop - span.start, width) for part, span in parts], dim=1)

    def gathered(self, order: RankTokenOrder, own: Tensor) -> Tensor:
        """(own_tokens, channels) → (tokens, channels): all tokens of `order`, for every member."""
        channels, size = own.shape[1], self._share.size
        flat = own.flatten().repeat(size)
        got = self._exchange.trade(flat, [own.numel()] * size, [count * channels for count in order.counts])
        return got.view(sum(order.counts), channels).index_select(0, order.by_sequence)

    @property
    def _share(self) -> Shard:
        return Shard(self._exchange.rank, self._exchange.size)


@dataclass(frozen=True, eq=False)
class ResidualShard:
    """One process's share of what ControlNets add; satisfies :class:`giornata.packed.uses.Residuals`."""

    of: Residuals
    own: PictureShard

    @property
    def whole(self) -> bool:
        """As of all tokens."""
        return self.of.whole

    def sample(self, block: int) -> Tensor | None:
        """Those of its own tokens, (own_tokens, channels)."""
        sample = self.of.sample(block)
        if sample is None:
            return None
        if self.of.whole:  # of the picture's tokens; companions lie behind them
            tokens = self.own.tokens[: int((self.own.places < len(sample)).sum())]
        elif self.own.computed is None:
            raise ValueError("a sequence has no region, and a residual of one")
        else:
            tokens = self.own.computed
        return sample.index_select(0, tokens)
