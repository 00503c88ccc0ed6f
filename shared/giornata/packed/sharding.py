"""Sequence parallelism: which tokens and heads each process has, and how they are exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from giornata.packed.packing import (
    BlockInputs,
    PackedBatch,
    Region,
    Residuals,
    Segments,
    make_layout,
    to_device,
)

# Which tokens and heads each process of a group has where a batch is shared by sequence parallelism. Pure.
#
# A process has a share of every sequence's text, of the tokens that its region computes, and of those
# outside; a share may be empty. In attention it has all tokens and a share of the heads instead.


TEXT: Final = 0
COMPUTED: Final = 1
OUTSIDE: Final = 2


def spread_evenly(count: int, order: Sequence[int]) -> tuple[slice, ...]:
    """`count` neighbours over ranks, by rank: equally many each, and one more to the first ranks of `order`."""
    each, more = divmod(count, len(order))
    first = set(order[:more])
    ends = accumulate((each + (rank in first) for rank in range(len(order))), initial=0)
    return tuple(slice(start, end) for start, end in pairwise(ends))


def rotate_ranks(size: int, turn: int) -> tuple[int, ...]:
    """All ranks in order, beginning with that of `turn`."""
    return tuple((turn + rank) % size for rank in range(size))


@dataclass(frozen=True)
class Shard:
    """A process's share of anything: the part `rank` of `size`."""

    rank: int
    size: int

    def heads(self, count: int) -> slice:
        """Its heads of so many."""
        return spread_evenly(count, rotate_ranks(self.size, 0))[self.rank]

    def channels(self, channels: int, heads: int, sites: int = 1) -> tuple[slice, ...]:
        """Return those of its heads among (tokens, channels) of so many `heads`, the same ones at each of `sites`."""
        width, own = channels // heads, self.heads(heads // sites)
        starts = range(0, heads, heads // sites)
        return tuple(slice((start + own.start) * width, (start + own.stop) * width) for start in starts)

    def portion(self, region: Region) -> RegionShard:
        """Its tokens of a picture with this region."""
        computed, outside = (part[self.rank] for part in _of_region(region, self.size))
        own, beyond = region.computed[computed], region.outside[outside]
        tokens = torch.cat((own, beyond)).sort().values
        places = [torch.searchsorted(tokens, part) for part in (own, beyond)]
        return RegionShard(tokens, beyond, Region(places[0], places[1], region.digest))


class RegionShard(NamedTuple):
    """A process's share of a picture; int64, ascending, on the region's device."""

    tokens: Tensor
    """(portion,): which of the picture's tokens, and of its companions."""
    outside: Tensor
    """Those of them that lie outside of the region."""
    region: Region
    """The region among the portion's tokens; either part may be empty."""


def _of_region(region: Region, size: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The shares of what is computed and of what is not, by rank.

    They follow from the region alone: what is kept of one step fits the next, beside any other sequences.
    """
    turn = int.from_bytes(region.digest, "little")
    computed = spread_evenly(len(region.computed), rotate_ranks(size, turn))
    return computed, spread_evenly(len(region.outside), rotate_ranks(size, ~turn))


class RankTokenOrder(NamedTuple):
    """Tokens of a batch, in the order in which one process has all of them, and in that of the ranks."""

    counts: tuple[int, ...]
    """Tokens of each rank."""
    segments: Segments
    """By sequence, in the order of one process."""
    by_rank: Tensor
    """(tokens,) int64 gathers the ranks' order: all of rank 0, all of rank 1."""
    by_sequence: Tensor
    """(tokens,) int64: the inverse, gathers the order of one process."""


class PictureShard(NamedTuple):
    """One process's share of a picture and its companions; int64."""

    places: Tensor
    """(own_tokens,): which of its tokens these are, on the CPU."""
    tokens: Tensor
    """The same on the batch's device."""
    region: Region | None
    """The picture's region among them."""
    computed: Tensor | None
    """(own_computed,): which of the region's tokens are among them, on the batch's device."""


class AllToAllGroup(Protocol):
    """A group of processes that compute one batch, as one of its members sees it."""

    @property
    def name(self) -> str:
        """Return which group it is; no two that are made have one name."""

    @property
    def rank(self) -> int:
        """Its place among them."""

    @property
    def size(self) -> int:
        """Return how many they are."""

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

    def part(self, sequences: PackedBatch) -> ShardedBatch:
        """This member's part of a batch of `sequences`; kept while these are."""
        if sequences not in self._parts:
            self._parts[sequences] = ShardedBatch(self._exchange, sequences)
        return self._parts[sequences]


class ShardedBatch:
    """One member's part of a batch: processes trade tokens for heads before attention, and back after it.

    Each rank has as many tokens of a sequence's text, region and outside as any other, or one less. Text makes up for
    what ranks have less of the picture, so that over a batch they have equally many, too. Work on a device waits for
    nothing here: indices are made once. Source: "DeepSpeed Ulysses", Jacobs et al. 2023, here over packed sequences of
    which every process has some tokens, with one uneven all-to-all each way.
    """

    def __init__(self, exchange: AllToAllGroup, sequences: PackedBatch) -> None:
        self._exchange, self.share = exchange, Shard(exchange.rank, exchange.size)
        self.layout = sequences.layout
        """Layout of all tokens of the batch."""
        self._device = sequences.layout.joint.device
        self._regions = tuple(
            None if region is None else region.on(torch.device("cpu")) for region in sequences.regions
        )
        self._orders: dict[tuple[object, ...], RankTokenOrder] = {}
        lengths = torch.tensor(self.layout.joint.lengths)
        self._sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self._kind, self._rank = self._assigned()
        mine = self._rank == self.share.rank
        streams = self._kind == TEXT, self._kind != TEXT
        text, image = (mine[stream].nonzero().squeeze(1) for stream in streams)
        self.text, self.image = (to_device(part, self._device) for part in (text, image))
        """(own_tokens,) int64: positions of this member's tokens in each stream of all tokens."""
        texts, images = (self._counted(mine & stream) for stream in streams)
        self.pictures = tuple(self._pictures(torch.split(image, list(images))))
        """This member's share of each sequence's picture."""
        joint = to_device(mine.nonzero().squeeze(1), self._device)
        cosine, sine = sequences.rotary
        self.sequences = PackedBatch(
            make_layout(texts, images, self._device, empty=True),
            (cosine.index_select(0, joint), sine.index_select(0, joint)),
            tuple(picture.region for picture in self.pictures),
        )
        """This member's tokens."""

    def live(
        self, whole: tuple[bool, ...], *, text: bool = True, behind: tuple[int, ...] = ()
    ) -> RankTokenOrder:
        """Tokens that a block computes: see :meth:`PackedBatch.live`; with text in joint order, or images alone.

        Without so many of the last tokens, `behind` its picture, of each sequence that is in `whole`.
        """
        key = whole, text, behind
        if key not in self._orders:
            chosen = (self._kind != OUTSIDE) | torch.tensor(whole)[self._sequence]
            if not text:
                chosen &= self._kind != TEXT
            for (_, end), every, count in zip(
                self.layout.joint.bounds, whole, behind or (0,) * len(whole), strict=True
            ):
                if every and count:
                    chosen[end - count : end] = False
            self._orders[key] = self._order(chosen)
        return self._orders[key]

    def beyond(self, of: tuple[int, ...]) -> RankTokenOrder:
        """The outside tokens of the sequences `of`, ascending: see :meth:`PackedBatch.beyond`."""
        if of not in self._orders:
            chosen = (self._kind == OUTSIDE) & torch.isin(self._sequence, torch.tensor(of))
            order = self._order(chosen)
            lengths = tuple(order.segments.lengths[sequence] for sequence in of)
            self._orders[of] = order._replace(segments=Segments(lengths, self._device))
        return self._orders[of]

    def uses(self, uses: Sequence[BlockInputs]) -> tuple[BlockInputs, ...]:
        """Return what this member's share of each sequence uses.

        Keys and values that are taken or recorded are of its heads, hidden states of its tokens.
        """
        if not uses:
            return ()
        return tuple(
            use if use.residuals is None else replace(use, residuals=ResidualShard(use.residuals, own))
            for use, own in zip(uses, self.pictures, strict=True)
        )

    def to_heads(self, order: RankTokenOrder, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(own_tokens, heads, head_dim) each → (tokens, own_heads, head_dim): all tokens of `order`, by sequence."""
        share, many = self.share, len(parts)
        own, heads, width = parts[0].shape
        spans = spread_evenly(heads, rotate_ranks(share.size, 0))
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
        share, width = self.share, attended.shape[2]
        own, each = order.counts[share.rank], attended.shape[1] * width
        spans = spread_evenly(heads, rotate_ranks(share.size, 0))
        received = [own * (span.stop - span.start) * width for span in spans]
        flat = attended.index_select(0, order.by_rank).flatten()
        got = self._exchange.trade(flat, [count * each for count in order.counts], received)
        parts = zip(torch.split(got, received), spans, strict=True)
        return torch.cat([part.view(own, span.stop - span.start, width) for part, span in parts], dim=1)

    def gathered(self, order: RankTokenOrder, own: Tensor) -> Tensor:
        """(own_tokens, channels) → (tokens, channels): all tokens of `order`, for every member."""
        channels, size = own.shape[1], self.share.size
        flat = own.flatten().repeat(size)
        got = self._exchange.trade(flat, [own.numel()] * size, [count * channels for count in order.counts])
        return got.view(sum(order.counts), channels).index_select(0, order.by_sequence)

    def _assigned(self) -> tuple[Tensor, Tensor]:
        """Kind and rank of every token in joint order, (tokens,) int64 each."""
        kind, rank = (torch.full_like(self._sequence, TEXT) for _ in range(2))
        loads = [0] * self.share.size

        def assign(of: int, tokens: Tensor, parts: Sequence[slice]) -> None:
            kind[tokens] = of
            for index, part in enumerate(parts):
                rank[tokens[part]] = index
                loads[index] += 0 if of == OUTSIDE else part.stop - part.start

        shapes = zip(self.layout.joint.bounds, self.layout.text.lengths, self._regions, strict=True)
        for (start, end), text, region in shapes:
            picture = torch.arange(start + text, end)
            if region is None:
                assign(COMPUTED, picture, spread_evenly(len(picture), _lightest(loads)))
            else:
                computed, outside = _of_region(region, self.share.size)
                assign(COMPUTED, picture[region.computed], computed)
                assign(OUTSIDE, picture[region.outside], outside)
            assign(TEXT, torch.arange(start, start + text), spread_evenly(text, _lightest(loads)))
        return kind, rank

    def _pictures(self, tokens: Sequence[Tensor]) -> Iterator[PictureShard]:
        """Return what this member has of each picture, of which these are the positions in the image stream."""
        device = torch.device(self._device)
        for own, region, (start, _) in zip(tokens, self._regions, self.layout.image.bounds, strict=True):
            places = own - start
            if region is None:
                yield PictureShard(places, to_device(places, device), None, None)
                continue
            portion = self.share.portion(region)
            computed = torch.searchsorted(region.computed, places[portion.region.computed])
            yield PictureShard(
                places, to_device(places, device), portion.region.on(device), to_device(computed, device)
            )

    def _counted(self, chosen: Tensor) -> tuple[int, ...]:
        """Return how many of the chosen tokens each sequence has."""
        counted: list[int] = torch.bincount(
            self._sequence[chosen], minlength=len(self.layout.joint.lengths)
        ).tolist()
        return tuple(counted)

    def _order(self, chosen: Tensor) -> RankTokenOrder:
        ranks = self._rank[chosen]
        by_rank = ranks.argsort(stable=True)
        counts: list[int] = torch.bincount(ranks, minlength=self.share.size).tolist()
        return RankTokenOrder(
            tuple(counts),
            Segments(self._counted(chosen), self._device),
            to_device(by_rank, self._device),
            to_device(by_rank.argsort(), self._device),
        )


def _lightest(loads: Sequence[int]) -> list[int]:
    """Ranks in the order of their loads."""
    return sorted(range(len(loads)), key=loads.__getitem__)


@dataclass(frozen=True, eq=False)
class ResidualShard:
    """One process's share of what ControlNets add; satisfies :class:`giornata.packed.packing.Residuals`."""

    of: Residuals
    own: PictureShard

    @property
    def whole(self) -> bool:
        """As of all tokens."""
        return self.of.whole

    def sample(self, block: int) -> Tensor | None:
        """Return those of its own tokens, (own_tokens, channels)."""
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
