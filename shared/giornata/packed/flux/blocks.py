"""The blocks of `FluxTransformer2DModel` over packed sequences, and what these meet in attention beside themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from giornata.packed.attention import Apart, Attention, Beside, DenseKV
from giornata.packed.elementwise import ElementwiseOps, HeadNorm, QKVProjection
from giornata.packed.flux.modulation import Modulation, Vectors
from giornata.packed.flux.projections import FluxProjections, FusedLinear
from giornata.packed.live import ComputeSetStream
from giornata.packed.low_rank import BatchLoras, LoraSpans
from giornata.packed.low_rank_hooks import LowRankHooks, of_text
from giornata.packed.packing import Segments
from giornata.packed.region import CachedTokenSegments, PackedBatch
from giornata.packed.ulysses import ShardedBatch, Ulysses
from giornata.packed.uses import BlockInputs, KeysValues, KeysValuesRecorder
from giornata.wire.values import BlockMode


class FluxComponents(NamedTuple):
    """What forwards are made of: a transformer, and what computes what it does to tokens between its products."""

    transformer: Any
    projections: FluxProjections
    attend: Attention
    elementwise: ElementwiseOps
    low_ranks: LowRankHooks
    """Hooks of the transformer's layers, through which LoRAs act."""
    ulysses: Ulysses | None = None
    """This process's parts of batches that several compute together; None: it computes batches alone."""


class FluxBlocks:
    """Which tokens of some sequences are live, what the others are, and what a block makes of them.

    `sequences` are of all tokens but padding that is taken, whoever computes them, `own` those of this process, of a
    batch that is `shared`. `uses` are by sequence, and empty where no sequence uses anything.
    """

    def __init__(  # noqa: PLR0917 - all that blocks read
        self,
        parts: FluxComponents,
        sequences: PackedBatch,
        modulation: Modulation,
        uses: Sequence[BlockInputs],
        padding: Mapping[int, int],
        shared: ShardedBatch | None = None,
    ) -> None:
        self._parts, self._transformer = parts, parts.transformer
        self._sequences, self._shared = sequences, shared
        self._own = sequences if shared is None else shared.sequences
        self.modulation = modulation
        self._padding: dict[int, KeysValues] = {
            s: use.padding for s, use in enumerate(uses) if use.padding is not None
        }
        self._padding_recorders: dict[int, tuple[KeysValuesRecorder, int]] = {
            s: (use.padding_recorder, padding[s])
            for s, use in enumerate(uses)
            if use.padding_recorder is not None
        }
        self.tokens = ComputeSetStream(self._own, uses if shared is None else shared.uses(uses))
        self.owners = BatchLoras([use.low_rank for use in uses])
        self._beyond: tuple[CachedTokenSegments, tuple[int, ...]] | None = None
        """The outside tokens, and of which sequences, that layers see instead of a stream's."""

    def spans(self, path: str) -> LoraSpans:
        """See :data:`giornata.packed.low_rank_hooks.Where`."""
        if self._beyond is not None:
            beyond, of = self._beyond
            return self.owners.over(beyond.segments.lengths, of)
        layout = self.tokens.now.layout
        if path.startswith("single_transformer_blocks."):
            return self.owners.over(layout.joint.lengths)
        return self.owners.over((layout.text if of_text(path) else layout.image).lengths)

    def _projections(self, joined: FusedLinear, normed: Tensor) -> tuple[Tensor, ...]:
        """What joined layers make of (tokens, in_features)."""
        parts = joined(normed)
        self._parts.low_ranks.add_each(joined.layers, normed, parts)
        return parts

    def double(self, index: int, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """`FluxTransformerBlock`: text and image stream with weights of their own and one attention."""
        layout, attn, each = self.tokens.now.layout, block.attn, self._parts.elementwise
        of_image, of_text = self.modulation.double(index)
        normed_text = each.modulated(text, of_text[:2], layout.text, block.norm1_context.norm.eps)
        normed_image = each.modulated(image, of_image[:2], layout.image, block.norm1.norm.eps)
        streams = (
            _projected(
                self._projections(self._parts.projections.text[index], normed_text),
                attn,
                attn.norm_added_q,
                attn.norm_added_k,
            ),
            _projected(
                self._projections(self._parts.projections.image[index], normed_image),
                attn,
                attn.norm_q,
                attn.norm_k,
            ),
        )
        attended = self._attention(
            index, streams, self._outside(index, attn, block.norm1.norm.eps, of_image[:2])
        )
        attended_text, attended_image = layout.split(attended)
        image = each.gated(image, attn.to_out[1](attn.to_out[0](attended_image)), of_image[2], layout.image)
        text = each.gated(text, attn.to_add_out(attended_text), of_text[2], layout.text)
        return (
            self._feed_forward(text, block.norm2_context, block.ff_context, of_text[3:], layout.text),
            self._feed_forward(image, block.norm2, block.ff, of_image[3:], layout.image),
        )

    def _feed_forward(
        self, hidden: Tensor, norm: Any, feed_forward: Any, vectors: Vectors, segments: Segments
    ) -> Tensor:
        """The residual MLP of a double block."""
        each, (shift, scale, gate) = self._parts.elementwise, vectors
        normed = each.modulated(hidden, (shift, scale), segments, norm.eps)
        return each.gated(hidden, feed_forward(normed), gate, segments)

    def single(self, index: int, block: Any, joint: Tensor) -> Tensor:
        """`FluxSingleTransformerBlock`: attention and MLP side by side on the joint order."""
        attn, each, segments = block.attn, self._parts.elementwise, self.tokens.now.layout.joint
        shift, scale, gate = self.modulation.single(index)
        normed = each.modulated(joint, (shift, scale), segments, block.norm.norm.eps)
        joined = self._parts.projections.single[index - len(self._transformer.transformer_blocks)]
        *attending, mlp = self._projections(joined, normed)
        stream = _projected(attending, attn, attn.norm_q, attn.norm_k)
        outside = self._outside(index, attn, block.norm.norm.eps, (shift, scale))
        attended = self._attention(index, (stream,), outside)
        return each.gated(joint, block.proj_out(each.beside_gelu(attended, mlp)), gate, segments)

    def _attention(
        self, block: int, streams: Sequence[QKVProjection], outside: Mapping[int, Beside]
    ) -> Tensor:
        """Each sequence over its own keys: what its tokens project → (joint_tokens, inner_dim).

        The one place where a token meets others.
        """
        live, shared = self.tokens.now, self._shared
        segments = live.layout.joint
        query, key, value = self._parts.elementwise.attended(streams, live.layout, live.rotary)
        heads = query.shape[1]
        if shared is not None:
            order = shared.shares.live(live.whole)
            segments = order.segments
            query, key, value = shared.to_heads(order, (query, key, value))
        self._record(block, segments, key, value)
        attended = self._parts.attend(query, key, value, segments, outside)
        return (attended if shared is None else shared.to_tokens(order, attended, heads)).flatten(1)

    def _record(self, block: int, segments: Segments, key: Tensor, value: Tensor) -> None:
        """Show recorders what they keep of all of a block's keys and values, (tokens, heads, head_dim) each."""
        lengths = self._sequences.layout.text.lengths
        for sequence, recorder in self.tokens.recorders.items():
            start, end = segments.bounds[sequence]
            picture = slice(start + lengths[sequence], end)
            recorder.keys_values(block, key[picture], value[picture])
        for sequence, (keeping, tokens) in self._padding_recorders.items():
            end = segments.bounds[sequence][0] + lengths[sequence]
            padding = slice(end - tokens, end)
            keeping.keys_values(block, key[padding], value[padding])

    def _outside(self, block: int, attn: Any, eps: float, shift_scale: Vectors) -> dict[int, Beside]:
        """Keys and values of tokens that are not live, by sequence: of the picture, and of padding.

        `eps` is that of the image stream's norm before the attention `attn`; `shift_scale` follows it, (sequences,
        inner_dim) each.
        """
        outside: dict[int, Apart] = {
            sequence: taken.source.keys_values(block)
            for sequence, taken in self.tokens.taken.items()
            if taken.modes[block] is BlockMode.KV
        }
        if self.tokens.hidden:
            sequences = tuple(self.tokens.hidden)
            beyond = self._own.beyond(sequences)
            each = self._parts.elementwise
            vectors = [vector.index_select(0, beyond.sequences) for vector in shift_scale]
            normed = each.modulated(
                torch.cat(list(self.tokens.hidden.values())), vectors, beyond.segments, eps
            )
            self._beyond = beyond, sequences
            projected = attn.to_k(normed), attn.to_v(normed)
            self._beyond = None
            key = each.rotated(_heads(projected[0], attn), _head_norm(attn.norm_k), beyond.rotary)
            value = _heads(projected[1], attn)
            bounds = beyond.segments.bounds
            if self._shared is not None:
                order = self._shared.shares.beyond(sequences)
                bounds = order.segments.bounds
                key, value = self._shared.to_heads(order, (key, value))
            outside |= {
                sequence: DenseKV(key[start:end], value[start:end])
                for sequence, (start, end) in zip(sequences, bounds, strict=True)
            }
        padding = {sequence: of.keys_values(block) for sequence, of in self._padding.items()}
        both = {s: (outside[s], kept) if s in outside else kept for s, kept in padding.items()}
        return {**outside, **both}


def _projected(parts: Sequence[Tensor], attn: Any, query_norm: Any, key_norm: Any) -> QKVProjection:
    """Query, key and value, (tokens, inner_dim) each, by head."""
    query, key, value = (_heads(part, attn) for part in parts)
    return QKVProjection(query, key, value, _head_norm(query_norm), _head_norm(key_norm))


def _head_norm(norm: Any) -> HeadNorm:
    return HeadNorm(norm.weight, norm.eps)


def _heads(projected: Tensor, attn: Any) -> Tensor:
    """(tokens, inner_dim) → (tokens, heads, head_dim)."""
    tokens, width = projected.shape
    return projected.view(tokens, width // attn.head_dim, attn.head_dim)
