"""One forward of a transformer's blocks over packed sequences: what tokens attend to, take, show and are changed by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from giornata.packed.attention import Apart, Attention, Beside, DenseKV, KVPages, outside_tokens
from giornata.packed.low_rank import BatchLoras, LoraSpans
from giornata.packed.packing import (
    BlockInputs,
    CachedTokenSegments,
    ComputeSet,
    KeysValuesRecorder,
    LaneTracer,
    Layout,
    PackedBatch,
    Rotary,
    Segments,
    TraceLane,
)
from giornata.packed.sharding import ShardedBatch
from giornata.wire.values import BlockMode

Pair = Callable[[int, Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A block of two streams: its number, the block, its live tokens of text and image, (tokens, channels) each."""
Single = Callable[[int, Any, Tensor], Tensor]
"""A block of the joint stream."""
Prefilled = Sequence[DenseKV]
"""Keys and values of one sequence's prefix by block, to which each step attends; empty where it has none."""


# Which tokens the blocks of one forward compute, and what the others are where they are needed.
#
# A stream is (tokens, ...): tokens of any shape, in the order of `giornata.packed.packing`.


LAST = -1
"""No block: behind the last one."""


class ComputeSetStream:
    """The image stream's live tokens, from block to block.

    Text is live in every block. A sequence that takes something computes its region alone, but for blocks in
    `Mode.FULL`.
    """

    def __init__(self, sequences: PackedBatch, uses: Sequence[BlockInputs]) -> None:
        self._sequences, self.plan = sequences, sequences.plan(tuple(uses))
        plan = self.plan
        self.taken, self.recorders, self.residuals = plan.taken, plan.recorders, plan.residuals
        self.hidden: dict[int, Tensor] = {}
        """By sequence: the present block's input of the outside tokens, (outside, ...), where it is needed."""
        self.now = self.plan.entering

    def enter(self, block: int, image: Tensor) -> Tensor:
        """The image stream as `block` computes it, (live_tokens, ...); recorders see it."""
        if self.taken:
            self.hidden = {}
            spans = self.now.layout.image.bounds
            for sequence in self.plan.hidden[block]:
                part, region = image[slice(*spans[sequence])], self._sequences.regions[sequence]
                if region is not None and self.now.whole[sequence]:
                    self.hidden[sequence] = part.index_select(0, region.outside)
                else:
                    self.hidden[sequence] = self._kept(sequence, block, part)
            wanted = self.plan.sets[block]
            if wanted is not self.now:
                image = self._converted(image, wanted, block)
        for sequence, recorder in self.recorders.items():
            part = image[slice(*self.now.layout.image.bounds[sequence])]
            recorder.hidden(block, part.flatten(1))
        return image

    def enter_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`enter` for the joint order."""
        plan = self.plan
        if not self.recorders and not (
            self.taken and (plan.hidden[block] or plan.sets[block] is not self.now)
        ):
            self.hidden = {}
            return joint
        text, image = self.now.layout.split(joint)
        image = self.enter(block, image)
        return self.now.layout.join(text, image)

    def add(self, block: int, image: Tensor) -> Tensor:
        """The image stream behind `block`, (live_tokens, channels), with what ControlNets add to it, in place."""
        return self._added(block, image, self.now.layout.image.bounds)

    def add_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`add` for the joint order."""
        return self._added(block, joint, _pictures(self.now.layout)) if self.residuals else joint

    def leave(self, image: Tensor) -> Tensor:
        """The regions' tokens of the image stream behind the last block."""
        return self._converted(image, self._sequences.live((False,) * len(self._sequences.regions)), LAST)

    def _added(self, block: int, stream: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """`stream`, in which the live tokens of each sequence's picture lie at `spans`."""
        for sequence, residuals in self.residuals.items():
            sample, region = residuals.sample(block), self._sequences.regions[sequence]
            if sample is None:
                continue
            part = stream[slice(*spans[sequence])]
            if residuals.whole and self.now.whole[sequence]:
                part[: len(sample)].add_(sample)  # companions lie behind the picture's tokens
            elif region is None:
                raise ValueError(f"sequence {sequence} has no region, and a residual of one")
            elif residuals.whole:
                part += sample.index_select(0, region.computed)
            elif self.now.whole[sequence]:
                part.index_add_(0, region.computed, sample)
            else:
                part += sample
        return stream

    def _kept(self, sequence: int, block: int, like: Tensor) -> Tensor:
        """The outside tokens as the template had them, of the shape of the tokens `like`."""
        kept = self.taken[sequence].source.hidden(block)
        return kept.view(len(kept), *like.shape[1:])

    def _converted(self, image: Tensor, wanted: ComputeSet, block: int) -> Tensor:
        """The image stream with the tokens of `wanted`, which are live from now on.

        Tokens that join are those of the input of `block`, as the template had them.
        """
        before, self.now = self.now, wanted
        if before is wanted:
            return image
        parts = list(torch.split(image, list(before.layout.image.lengths)))
        for sequence, region in enumerate(self._sequences.regions):
            had, want = before.whole[sequence], wanted.whole[sequence]
            if region is None or had == want:
                continue
            part = parts[sequence]
            if had:
                parts[sequence] = part.index_select(0, region.computed)
            else:
                whole = part.new_empty(len(region.computed) + len(region.outside), *part.shape[1:])
                whole[region.computed] = part
                whole[region.outside] = self._kept(sequence, block, part)
                parts[sequence] = whole
        return torch.cat(parts)


def _pictures(layout: Layout) -> list[tuple[int, int]]:
    """(start, end) of each sequence's image tokens in the joint order."""
    spans = zip(layout.joint.bounds, layout.text.lengths, strict=True)
    return [(start + text, end) for (start, end), text in spans]


# One forward.


class TokenStream(Enum):
    """Tokens that a module sees, packed by sequence."""

    TEXT = auto()
    IMAGE = auto()
    """The picture's live tokens, and its companions behind them."""
    JOINT = auto()
    """Text and image of each sequence."""
    OUTPUT = auto()
    """The tokens that the network answers for: those of the regions, without companions."""


class AttentionSite(NamedTuple):
    """A place where tokens meet: one attention of a block."""

    block: int
    nth: int = 0
    sites: int = 1
    """Attentions of the block: a recording keeps their heads side by side."""


class PackedForward:
    """One forward over `sequences`: of all tokens but padding that is taken, whoever computes them.

    `uses` are by sequence, and empty where no sequence uses anything; so are `prefixes`. Of a batch that is `shared`,
    this process computes its part. `output` are the segments of :attr:`TokenStream.OUTPUT`.
    """

    def __init__(  # noqa: PLR0917 - all that a forward is
        self,
        sequences: PackedBatch,
        uses: Sequence[BlockInputs],
        attend: Attention,
        shared: ShardedBatch | None = None,
        prefixes: Sequence[Prefilled] = (),
        output: Segments | None = None,
    ) -> None:
        self._attend, self._shared, self._output = attend, shared, output
        self._own = sequences if shared is None else shared.sequences
        self._text = (sequences if shared is None else shared).layout.text.lengths
        self.tokens = ComputeSetStream(self._own, uses if shared is None else shared.uses(uses))
        self.owners = BatchLoras([use.low_rank for use in uses])
        self._prefixed = any(prefixes)
        self._apart: dict[int, Callable[[int], Apart]] = {
            s: prefix.__getitem__ for s, prefix in enumerate(prefixes) if prefix
        }
        """By sequence: what it attends to in every block beside its picture, by block."""
        self._padding_recorders: dict[int, tuple[KeysValuesRecorder, int]] = {}
        for s, use in enumerate(uses):
            if use.padding is not None:
                self._apart[s] = use.padding.keys_values
            if use.padding_recorder is not None:
                self._padding_recorders[s] = use.padding_recorder, sequences.padding[s]
        self._beyond: CachedTokenSegments | None = None
        """The outside tokens that modules see instead of a stream's."""
        self._shown: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By sequence: keys and values of the present block's sites so far."""
        self._kept: dict[int, Sequence[Apart]] = {}
        """By sequence: what the present block takes, of all of its sites."""
        self._projected_kv: dict[int, Sequence[DenseKV]] = {}
        """The same of what it projects from hidden states."""

    def passed(  # noqa: PLR0917 - all blocks of a network
        self,
        pairs: Sequence[Any],
        singles: Sequence[Any],
        pair: Pair,
        single: Single,
        text: Tensor,
        image: Tensor,
        trace: LaneTracer,
    ) -> Tensor:
        """The regions' tokens behind the last block, of both streams before the first, (live_tokens, channels) each."""
        tokens = self.tokens
        for index, block in enumerate(pairs):
            with trace.span(TraceLane.COMPUTE, f"block {index}"):
                text, image = pair(index, block, text, tokens.enter(index, image))
                if tokens.residuals:
                    image = tokens.add(index, image)
        if singles:
            joint = tokens.now.layout.join(text, image)
            for index, block in enumerate(singles, len(pairs)):
                with trace.span(TraceLane.COMPUTE, f"block {index}"):
                    joint = single(index, block, tokens.enter_joint(index, joint))
                    if tokens.residuals:
                        joint = tokens.add_joint(index, joint)
            image = tokens.now.layout.split(joint)[1]
        return tokens.leave(image)

    def segments(self, stream: TokenStream) -> Segments:
        """The tokens of each sequence in a stream."""
        if self._beyond is not None:
            return self._beyond.segments
        if stream is TokenStream.OUTPUT and self._output is not None:
            return self._output
        layout = self.tokens.now.layout
        if stream is TokenStream.JOINT:
            return layout.joint
        return layout.text if stream is TokenStream.TEXT else layout.image

    def spans(self, stream: TokenStream) -> LoraSpans:
        """Return what the sequences' LoRAs change of the tokens of a stream."""
        of = None if self._beyond is None else tuple(self.tokens.hidden)
        return self.owners.over(self.segments(stream).lengths, of)

    def rotary(self, stream: TokenStream) -> Rotary | None:
        """Cosine and sine of the tokens of a stream; None where positions turn nothing."""
        cosine, sine = self.tokens.now.rotary if self._beyond is None else self._beyond.rotary
        if not cosine.shape[1]:
            return None
        if self._beyond is not None or stream is TokenStream.JOINT:
            return cosine, sine
        split = self.tokens.now.layout.split
        return split(cosine)[1], split(sine)[1]

    @contextmanager
    def beyond(self) -> Iterator[Tensor]:
        """The outside tokens of which the present block projects keys and values, (tokens, channels).

        Within, segments and positions are theirs in every stream.
        """
        hidden = self.tokens.hidden
        self._beyond = self._own.beyond(tuple(hidden))
        try:
            yield torch.cat(list(hidden.values()))
        finally:
            self._beyond = None

    def keep(self, sites: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Have the present block attend to keys and values that it projected :meth:`beyond`, one pair of each site."""
        of = tuple(self.tokens.hidden)
        parts = list(chain.from_iterable(sites))
        segments = self._own.beyond(of).segments
        if self._shared is not None:
            order = self._shared.beyond(of)
            segments, parts = order.segments, list(self._shared.to_heads(order, parts))
        self._projected_kv = {
            sequence: [
                DenseKV(key[start:end], value[start:end])
                for key, value in zip(parts[::2], parts[1::2], strict=True)
            ]
            for sequence, (start, end) in zip(of, segments.bounds, strict=True)
        }

    def attended(
        self, site: AttentionSite, stream: TokenStream, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Each sequence over its own keys and those outside: (tokens, heads, head_dim) each → (tokens, channels).

        The one place where a token meets others. `stream` is the joint order, or the image stream where no text is
        attended to.
        """
        shared, heads = self._shared, query.shape[1]
        live, joint = self.tokens.now, stream is TokenStream.JOINT
        segments = live.layout.joint if joint else live.layout.image
        if shared is not None:
            order = shared.live(live.whole, text=joint)
            segments = order.segments
            query, key, value = shared.to_heads(order, (query, key, value))
        if self.tokens.recorders or self._padding_recorders:
            self._record(site, segments, key, value, text=joint)
        found = self._attend(query, key, value, segments, self._outside(site, segments, key))
        return (found if shared is None else shared.to_tokens(order, found, heads)).flatten(1)

    def _record(
        self, site: AttentionSite, segments: Segments, key: Tensor, value: Tensor, *, text: bool
    ) -> None:
        """Show recorders keys and values of image tokens and of padding, those of all sites of a block together."""
        for sequence, recorder in self.tokens.recorders.items():
            start, end = segments.bounds[sequence]
            picture = slice(start + (self._text[sequence] if text else 0), end)
            shown = self._shown.setdefault(sequence, [])
            shown.append((key[picture], value[picture]))
            if len(shown) == site.sites:
                keys, values = zip(*self._shown.pop(sequence), strict=True)
                recorder.keys_values(site.block, _side_by_side(keys), _side_by_side(values))
        for sequence, (keeping, tokens) in self._padding_recorders.items():
            end = segments.bounds[sequence][0] + self._text[sequence]
            keeping.keys_values(site.block, key[end - tokens : end], value[end - tokens : end])

    def _outside(self, site: AttentionSite, own: Segments, key: Tensor) -> Mapping[int, Beside]:
        """Return what each sequence attends to beside its own tokens, of which `key` is what the site projects.

        What a block with one site takes as it is kept is the same in every step.
        """
        known = self.tokens.plan.outside
        stays = site.sites == 1 and not self._prefixed
        found = known.get(site.block) if stays else None
        if found is None:
            found = self._stored(site, own, key)
            if stays:
                known[site.block] = found
        if not self.tokens.hidden:
            return found
        projected = {s: of_sites[site.nth] for s, of_sites in self._projected_kv.items()}
        if site.sites == 1 and not self._apart:
            return {**found, **projected}
        return found | {s: self._beside(s, kept, site, own) for s, kept in projected.items()}

    def _stored(self, site: AttentionSite, own: Segments, key: Tensor) -> dict[int, Beside]:
        """The same of what is kept as keys and values; a block projects others from hidden states."""
        found: dict[int, Beside] = {s: apart(site.block) for s, apart in self._apart.items()}
        for sequence, taken in self.tokens.taken.items():
            if taken.modes[site.block] is not BlockMode.KV:
                continue
            if site.nth == 0:
                kept = taken.source.keys_values(site.block)
                self._kept[sequence] = [kept] if site.sites == 1 else _by_site(kept, site.sites, key)
            found[sequence] = self._beside(sequence, self._kept[sequence][site.nth], site, own)
        return found

    def _beside(self, sequence: int, kept: Apart, site: AttentionSite, own: Segments) -> Beside:
        """Return what a sequence attends to where `kept` is of its picture, with room for all others or none."""
        tokens = own.lengths[sequence]
        apart = self._apart.get(sequence)
        if apart is None:
            return _fitted(kept, tokens)
        other = apart(site.block)
        return _fitted(kept, tokens + outside_tokens(other)), other


def _side_by_side(sites: Sequence[Tensor]) -> Tensor:
    """(tokens, heads, head_dim) of each site → (tokens, heads of all sites, head_dim)."""
    return sites[0] if len(sites) == 1 else torch.cat(list(sites), dim=1)


def _by_site(kept: Apart, sites: int, key: Tensor) -> list[DenseKV]:
    """Return what is taken of each site of a block; `key` is what one of them projects, (tokens, heads, head_dim)."""
    if isinstance(kept, KVPages):
        shape = len(kept), sites * key.shape[1], key.shape[2]
        of_key, of_value = (rows.to(key.dtype).view(shape) for rows in kept.rows())
        kept = DenseKV(of_key, of_value)
    keys, values = (part.chunk(sites, dim=1) for part in (kept.key, kept.value))
    return [DenseKV(*of_site, kept.room) for of_site in zip(keys, values, strict=True)]


def _fitted(outside: Apart, own: int) -> Apart:
    """`outside` with room for `own` tokens, or none: an attention without text needs less."""
    if isinstance(outside, KVPages) or outside.room in (0, own):
        return outside
    spare = outside.room - own
    return DenseKV(outside.key[spare:], outside.value[spare:], own)
