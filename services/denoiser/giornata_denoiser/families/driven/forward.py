"""One forward of a driven transformer: its modulation, its hooks, and how its tokens attend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from giornata.packed.attention import Apart, Attention, Beside, DenseKV
from giornata.packed.block_inputs import BlockInputs
from giornata.packed.compute_set import CachedTokenSegments, ComputeSetStream, PackedBatch, Rotary
from giornata.packed.elementwise import rotate
from giornata.packed.low_rank import BatchLoras, LoraSpans, LowRankHooks, Where, is_text_layer
from giornata.packed.packing import Segments
from giornata.packed.pages import KVPages
from giornata.packed.sharding import ShardedBatch
from giornata.wire.values import BlockMode

# The state of one driven forward: its modulation, and what its tokens attend to.


Prefilled = tuple[DenseKV, ...]
"""Keys and values of one sequence's prefix by block, to which each step attends; empty where it has none."""


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


class CleanTokens(NamedTuple):
    """Companions that see timestep 0 in every step: clean pictures."""

    vectors: Tensor
    """(sequences, width): their modulation."""
    counts: tuple[int, ...]
    """How many each sequence has behind its picture's tokens."""


class ForwardContext:
    """One forward over `sequences`.

    `vectors` are (sequences, width): the modulation of each sequence's step. `uses` are by sequence, and empty where no
    sequence uses anything. `output` are the segments of :attr:`TokenStream.OUTPUT`. `prefixes` are by sequence. Where
    it is `shared`, `sequences` are this process's share. `clean` is there where companions have a modulation of their
    own.
    """

    def __init__(  # noqa: PLR0917 - all that a forward is
        self,
        sequences: PackedBatch,
        vectors: Tensor,
        uses: Sequence[BlockInputs],
        attend: Attention,
        output: Segments,
        prefixes: Sequence[Prefilled] = (),
        shared: ShardedBatch | None = None,
        clean: CleanTokens | None = None,
    ) -> None:
        self._sequences, self._vectors, self._attend, self._output = sequences, vectors, attend, output
        self._prefixes = {sequence: prefix for sequence, prefix in enumerate(prefixes) if prefix}
        self._shared, self._clean = shared, clean
        self.tokens = ComputeSetStream(sequences, uses if shared is None else shared.uses(uses))
        self.owners = BatchLoras([use.low_rank for use in uses])
        self._beyond: CachedTokenSegments | None = None
        """The outside tokens that modules see instead of a stream's."""
        self._shown: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By sequence: keys and values of the present block's sites so far."""
        self._kept: dict[int, DenseKV | KVPages] = {}
        """By sequence: what the present block takes, of all of its sites."""

    def vectors(self, start: int, width: int, stream: TokenStream) -> Tensor:
        """A slice of the modulation, (items, width): a vector of each of the items of :meth:`batched`."""
        part = self._vectors[:, start : start + width]
        if self._clean is not None and self._behind(stream):
            part = torch.stack((part, self._clean.vectors[:, start : start + width]), dim=1)
        if self._beyond is not None:
            part = part.index_select(0, self._beyond.sequences)
        segments, part = self.modulated(stream), part.flatten(0, -2)
        return part if segments.even else part.index_select(0, segments.sequence)

    def batched(self, tokens: Tensor, stream: TokenStream) -> Tensor:
        """(tokens of `stream`, channels) as :attr:`~Segments.items`: (items, tokens of each, channels)."""
        return tokens.view(*self.modulated(stream).items, tokens.shape[-1])

    def modulated(self, stream: TokenStream) -> Segments:
        """The tokens of a stream that share their modulation: a sequence's, or its picture's and its companions'."""
        if self._clean is None:
            return self.segments(stream)
        segments, behind = self.segments(stream), self._behind(stream)
        return _set_apart(segments.lengths, behind, segments.device) if behind else segments

    def segments(self, stream: TokenStream) -> Segments:
        """The tokens of each sequence in a stream."""
        if self._beyond is not None:
            return self._beyond.segments
        if stream is TokenStream.OUTPUT:
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
        """The outside tokens of which the present block projects keys and values, (items, tokens of each, channels).

        Within, modulation and positions are theirs in every stream.
        """
        hidden = self.tokens.hidden
        self._beyond = self._sequences.beyond(tuple(hidden))
        try:
            yield self.batched(torch.cat(list(hidden.values())), TokenStream.IMAGE)
        finally:
            self._beyond = None

    def keep(self, sites: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Have the present block attend to keys and values that it projected :meth:`beyond`, one pair of each site."""
        of = tuple(self.tokens.hidden)
        parts = [part for site in sites for part in site]
        segments = self._sequences.beyond(of).segments
        if self._shared is not None:
            order = self._shared.shares.beyond(of)
            segments, parts = order.segments, list(self._shared.to_heads(order, parts))
        keys, values = _side_by_side(parts[::2]), _side_by_side(parts[1::2])
        for sequence, (start, end) in zip(of, segments.bounds, strict=True):
            self._kept[sequence] = DenseKV(keys[start:end], values[start:end])

    def attended(
        self, site: AttentionSite, stream: TokenStream, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Each sequence over its own keys and those outside: (tokens, heads, head_dim) each → (tokens, channels).

        `stream` is the joint order, or the image stream where no text is attended to.
        """
        shared, heads = self._shared, query.shape[1]
        segments = self.segments(stream)
        if shared is not None:
            order = shared.shares.live(self.tokens.now.whole, text=stream is TokenStream.JOINT)
            segments = order.segments
            query, key, value = shared.to_heads(order, (query, key, value))
        if self.tokens.recorders:
            self._show(site, stream, segments, key, value)
        outside = self._outside(site, segments, key)
        found = self._attend(query, key, value, segments, outside)
        return (found if shared is None else shared.to_tokens(order, found, heads)).flatten(1)

    def _behind(self, stream: TokenStream) -> tuple[int, ...]:
        """Return how many tokens of each segment of a stream are clean ones, the last; empty where there are none."""
        if self._clean is None or stream is not TokenStream.IMAGE:
            return ()
        counts = self._clean.counts
        if self._beyond is not None:
            found = tuple(counts[sequence] for sequence in self.tokens.hidden)
        else:
            found = tuple(
                count if whole else 0 for count, whole in zip(counts, self.tokens.now.whole, strict=True)
            )
        return found if any(found) else ()

    def _show(
        self, site: AttentionSite, stream: TokenStream, segments: Segments, key: Tensor, value: Tensor
    ) -> None:
        """Show the recorders keys and values of the image tokens, those of all sites of a block together."""
        layout = self.tokens.now.layout if self._shared is None else self._shared.layout
        text = layout.text.lengths if stream is TokenStream.JOINT else (0,) * len(layout.text.lengths)
        bounds = segments.bounds
        for sequence, recorder in self.tokens.recorders.items():
            start, end = bounds[sequence]
            picture = slice(start + text[sequence], end)
            shown = self._shown.setdefault(sequence, [])
            shown.append((key[picture], value[picture]))
            if len(shown) == site.sites:
                keys, values = zip(*self._shown.pop(sequence), strict=True)
                recorder.keys_values(site.block, _side_by_side(keys), _side_by_side(values))

    def _outside(self, site: AttentionSite, own: Segments, key: Tensor) -> Mapping[int, Beside]:
        """Return what each sequence attends to beside its own tokens, of which `key` is what the site projects.

        What a block with one site takes as it is kept is the same in every step.
        """
        known = self.tokens.plan.outside
        stays = site.sites == 1 and not self.tokens.hidden and not self._prefixes
        if stays and site.block in known:
            return known[site.block]
        found: dict[int, Beside] = {
            sequence: prefix[site.block] for sequence, prefix in self._prefixes.items()
        }
        for sequence, taken in self.tokens.taken.items():
            mode = taken.modes[site.block]
            if mode is BlockMode.KV and site.nth == 0:
                kept = taken.source.keys_values(site.block)
                self._kept[sequence] = _by_head(kept, site.sites, key) if site.sites > 1 else kept
            if mode is BlockMode.FULL:
                continue
            kept = _of_site(self._kept[sequence], site)
            prefix = self._prefixes.get(sequence)
            if prefix is None:
                found[sequence] = _fitted(kept, own.lengths[sequence])
            else:
                before = prefix[site.block]
                found[sequence] = _fitted(kept, own.lengths[sequence] + len(before.key)), before
        if stays:
            known[site.block] = found
        return found


@lru_cache(maxsize=64)
def _set_apart(lengths: tuple[int, ...], behind: tuple[int, ...], device: torch.device | str) -> Segments:
    """Two segments of each sequence: its tokens without the last, so many ones `behind`, and these."""
    pairs = ((length - last, last) for length, last in zip(lengths, behind, strict=True))
    return Segments(tuple(tokens for pair in pairs for tokens in pair), device)


def _side_by_side(sites: Sequence[Tensor]) -> Tensor:
    """(tokens, heads, head_dim) of each site → (tokens, heads of all sites, head_dim)."""
    return sites[0] if len(sites) == 1 else torch.cat(list(sites), dim=1)


def _by_head(kept: DenseKV | KVPages, sites: int, key: Tensor) -> DenseKV:
    """Return what is taken of all sites of a block; `key` is what one of them projects, (tokens, heads, head_dim)."""
    if isinstance(kept, DenseKV):
        return kept
    shape = len(kept), sites * key.shape[1], key.shape[2]
    of_key, of_value = (rows.to(key.dtype).view(shape) for rows in kept.rows())
    return DenseKV(of_key, of_value)


def _of_site(kept: DenseKV | KVPages, site: AttentionSite) -> DenseKV | KVPages:
    """The heads of one site; stored pages are those of a block with one."""
    if isinstance(kept, KVPages) or site.sites == 1:
        return kept
    key, value = (part.chunk(site.sites, dim=1)[site.nth] for part in (kept.key, kept.value))
    return DenseKV(key, value, kept.room)


def _fitted(outside: Apart, own: int) -> Apart:
    """`outside` with room for `own` tokens, or none: an attention without text needs less."""
    if isinstance(outside, KVPages) or outside.room in (0, own):
        return outside
    spare = outside.room - own
    return DenseKV(outside.key[spare:], outside.value[spare:], own)


# Which tokens each layer of a driven transformer sees, for the LoRAs of its sequences.


class LayerStreams:
    """The streams of one transformer's layers: those of blocks of `pairs`, of `singles`, and behind the blocks."""

    def __init__(self, hooks: LowRankHooks, pairs: Sequence[Any], singles: Sequence[Any]) -> None:
        self._streams: dict[str, TokenStream] = {}
        for block in pairs:
            self._streams |= {
                path: TokenStream.TEXT if is_text_layer(path) else TokenStream.IMAGE
                for path in hooks.paths_in(block)
            }
        for block in singles:
            self._streams |= dict.fromkeys(hooks.paths_in(block), TokenStream.JOINT)

    def where(self, forward: ForwardContext) -> Where | None:
        """Return where LoRAs act in the blocks of `forward` and behind them; None for nowhere."""
        if not forward.owners:
            return None
        return lambda path: forward.spans(self._streams.get(path, TokenStream.OUTPUT))

    def entering(self, forward: ForwardContext, companions: Sequence[int]) -> Where | None:
        """Where they act on the pictures' tokens before the blocks, without so many `companions` of each sequence."""
        if not forward.owners:
            return None
        live = forward.tokens.now
        lengths = tuple(
            length - (count if whole else 0)
            for length, count, whole in zip(live.layout.image.lengths, companions, live.whole, strict=True)
        )
        return lambda _: forward.owners.over(lengths)


# What is changed of a transformer so that its blocks serve packed sequences: who modulates, and how tokens
# attend.
#
# Blocks see hidden states as a batch, (items, tokens of each, channels), and a block's own
# `gate.unsqueeze(1) * x` broadcasts one vector an item. Sequences of one length are the items. Where
# lengths differ, every token is an item of its own, and the vectors of a sequence are spread to its tokens.
# The vectors of all steps are made when a row joins, so that no step reads the weights of modulation
# layers.


Activation = Callable[[Tensor], Tensor]


class TransformerHooks:
    """The hooks of one transformer, and the forward that they read: one at a time, on the thread that predicts."""

    def __init__(self) -> None:
        self._forward: ForwardContext | None = None
        self._layers: list[tuple[nn.Module, Activation]] = []
        self.width = 0
        """Channels of all vectors of one step."""

    @property
    def forward(self) -> ForwardContext:
        """The present forward.

        Raises:
            RuntimeError: a module runs outside of :meth:`running`.
        """
        if self._forward is None:
            raise RuntimeError("a driven block runs within a forward alone")
        return self._forward

    @contextmanager
    def running(self, forward: ForwardContext) -> Iterator[ForwardContext]:
        """Have the hooks read `forward`, and what they read before again afterwards."""
        before, self._forward = self._forward, forward
        try:
            yield forward
        finally:
            self._forward = before

    def spread(
        self,
        parent: Any,
        name: str,
        stream: TokenStream,
        activation: Activation = nn.Identity(),  # noqa: B008 - stateless
    ) -> None:
        """Let the modulation layer `name` of `parent` answer with prepared vectors of `stream`.

        `activation` is what the parent does to the embedding before the layer.
        """
        layer = getattr(parent, name)
        self._layers.append((layer, activation))
        setattr(parent, name, PrecomputedModulation(self, layer, self.take(_out_features(layer)), stream))

    def spread_argument(self, norm: Any, parts: int, width: int, stream: TokenStream) -> None:
        """Give `norm` its argument `emb`, (items, parts, width), from prepared vectors that no layer makes."""
        start = self.take(parts * width)

        def given(_: object, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            vectors = self.forward.vectors(start, parts * width, stream)
            return args, named | {"emb": vectors.view(len(vectors), parts, width)}

        norm.register_forward_pre_hook(given, with_kwargs=True)

    def take(self, width: int) -> int:
        """Return where the next `width` channels of a step's vectors begin."""
        start, self.width = self.width, self.width + width
        return start

    def vectors(self, embedding: Tensor) -> Tensor:
        """(steps, width): what all spread layers make of (steps, channels), in order."""
        return torch.cat([layer(activation(embedding)) for layer, activation in self._layers], dim=1)

    def rotated(self, heads: Tensor, stream: TokenStream) -> Tensor:
        """(tokens, heads, head_dim) at the positions of their tokens."""
        rotary = self.forward.rotary(stream)
        return heads if rotary is None else rotate(heads, rotary)


class PrecomputedModulation(nn.Module):
    """Stands where a modulation layer stood: the layer's vectors of every sequence's step, spread to tokens."""

    def __init__(self, hooks: TransformerHooks, layer: nn.Module, start: int, stream: TokenStream) -> None:
        super().__init__()
        self.layer = layer
        self._hooks, self._start, self._width, self._stream = hooks, start, _out_features(layer), stream

    def forward(self, _: Tensor) -> Tensor:
        """(items, width): see :meth:`ForwardContext.batched`."""
        return self._hooks.forward.vectors(self._start, self._width, self._stream)


def _out_features(layer: nn.Module) -> int:
    """Output features of the last linear layer of a modulation layer."""
    *_, last = (module for module in layer.modules() if isinstance(module, nn.Linear))
    return last.out_features


# How tokens attend in driven blocks: processors of diffusers' attention modules, the only place where
# tokens meet.


class JointAttention:
    """Attention of two streams with projections of their own: a processor of diffusers' attention modules."""

    def __init__(self, hooks: TransformerHooks, site: AttentionSite) -> None:
        self._hooks, self._site = hooks, site

    def __call__(  # noqa: D102, PLR0917 - as diffusers'
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' modules; padding is dropped
        encoder_hidden_states_mask: None = None,  # noqa: ARG002 - as above
        image_rotary_emb: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
    ) -> tuple[Tensor, Tensor]:
        hooks, layout = self._hooks, self._hooks.forward.tokens.now.layout
        image = project_qkv(attn, hidden_states)
        text = (
            by_head(attn, attn.add_q_proj(encoder_hidden_states), attn.norm_added_q),
            by_head(attn, attn.add_k_proj(encoder_hidden_states), attn.norm_added_k),
            by_head(attn, attn.add_v_proj(encoder_hidden_states)),
        )
        query = hooks.rotated(layout.join(text[0], image[0]), TokenStream.JOINT)
        key = hooks.rotated(layout.join(text[1], image[1]), TokenStream.JOINT)
        value = layout.join(text[2], image[2])
        attended = hooks.forward.attended(self._site, TokenStream.JOINT, query, key, value)
        of_text, of_image = layout.split(attended)
        of_text, of_image = batched_as(encoder_hidden_states, of_text), batched_as(hidden_states, of_image)
        to_text = attn.to_add_out
        return attn.to_out[0](of_image), of_text if to_text is None else to_text(of_text)


class SelfAttention:
    """Attention of one stream: a processor of diffusers' attention modules."""

    def __init__(self, hooks: TransformerHooks, site: AttentionSite, stream: TokenStream) -> None:
        self._hooks, self._site, self._stream = hooks, site, stream

    def __call__(  # noqa: D102, PLR0917 - as diffusers'
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,  # noqa: ARG002 - of diffusers' modules
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' blocks; padding is dropped
        freqs_cis: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
        image_rotary_emb: None = None,  # noqa: ARG002 - as above
    ) -> Tensor:
        attended = self.attended(hidden_states, *project_qkv(attn, hidden_states))
        to_out = getattr(attn, "to_out", None)
        return attended if to_out is None else to_out[0](attended)

    def attended(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(tokens, heads, head_dim) each, normed → (items, tokens of each, channels), as `hidden` is."""
        hooks, stream = self._hooks, self._stream
        query, key = hooks.rotated(query, stream), hooks.rotated(key, stream)
        found = hooks.forward.attended(self._site, stream, query, key, value)
        return batched_as(hidden, found)


class ParallelAttention(SelfAttention):
    """Attention beside a feed-forward, whose projections are one layer."""

    def __call__(  # type: ignore[override]  # noqa: D102 - as diffusers', without a second stream
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' modules; nothing is padded
        image_rotary_emb: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
    ) -> Tensor:
        sizes = [*[attn.inner_dim] * 3, attn.mlp_hidden_dim * attn.mlp_mult_factor]
        *heads, mlp = attn.to_qkv_mlp_proj(hidden_states).split(sizes, dim=-1)
        query, key, value = (by_head(attn, part) for part in heads)
        attended = self.attended(hidden_states, attn.norm_q(query), attn.norm_k(key), value)
        out: Tensor = attn.to_out(torch.cat((attended, attn.mlp_act_fn(mlp)), dim=-1))
        return out


def project_qkv(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of (items, tokens of each, channels): (tokens, heads, head_dim), the first two normed."""
    return (
        by_head(attn, attn.to_q(hidden), attn.norm_q),
        by_head(attn, attn.to_k(hidden), attn.norm_k),
        by_head(attn, attn.to_v(hidden)),
    )


def by_head(attn: Any, projection: Tensor, norm: Any = None) -> Tensor:
    """(items, tokens of each, channels) → (tokens, heads, head_dim), normed if there is a norm."""
    *items, channels = projection.shape
    heads = projection.view(math.prod(items), attn.heads, channels // attn.heads)
    return heads if norm is None else norm(heads)


def batched_as(hidden: Tensor, tokens: Tensor) -> Tensor:
    """(tokens, channels) → (items, tokens of each, channels), with the items of `hidden`."""
    items, each, _ = hidden.shape
    return tokens.view(items, each, tokens.shape[1])
