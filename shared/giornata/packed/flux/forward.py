"""One forward of `FluxTransformer2DModel` over packed sequences; some take part of it from a template.

Its linear layers are called as they are, or several as one product; what happens between them is that of
:mod:`giornata.packed.elementwise`, and the attention is over each sequence's own keys. Without templates it equals the
module's own `forward` of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from giornata.packed.attention import Apart, Attention, Beside, Outside
from giornata.packed.elementwise import Elementwise, HeadNorm, Projected
from giornata.packed.flux.modulation import Modulation, Vectors
from giornata.packed.flux.projections import Joined, Projections
from giornata.packed.live import LiveTokens
from giornata.packed.low_rank import Owners, Spans
from giornata.packed.low_rank_hooks import LowRankHooks, of_text
from giornata.packed.packing import Segments
from giornata.packed.region import Beyond, Sequences
from giornata.packed.tracing import Lane, Tracing
from giornata.packed.ulysses import Ulysses
from giornata.packed.uses import Use
from giornata.wire.values import Mode


class Parts(NamedTuple):
    """What forwards are made of: a transformer, and what computes what it does to tokens between its products."""

    transformer: Any
    projections: Projections
    attend: Attention
    elementwise: Elementwise
    low_ranks: LowRankHooks
    """Of the transformer."""
    ulysses: Ulysses | None = None
    """Of the processes that compute a batch together; None computes it alone."""


class FluxForward:
    """The state of one forward: which tokens are live, and what the others are.

    `modulation` is that of the sequences' steps. `uses` are by sequence, and empty
    where no sequence uses anything.
    """

    def __init__(
        self,
        parts: Parts,
        sequences: Sequences,
        modulation: Modulation,
        uses: Sequence[Use],
        *,
        trace: Tracing,
    ) -> None:
        self._parts, self._transformer, self._trace = parts, parts.transformer, trace
        self._modulation = modulation
        self._padding = {s: use.padding for s, use in enumerate(uses) if use.padding is not None}
        self._padding_recorders = {
            s: (use.padding_recorder, sequences.padding[s])
            for s, use in enumerate(uses)
            if use.padding_recorder is not None
        }
        unpadded = sequences.without_padding(tuple(self._padding)) if self._padding else None
        self._sequences = sequences if unpadded is None else unpadded.sequences
        """Of all tokens but padding that is taken, whoever computes them."""
        self._live_text = None if unpadded is None else unpadded.text
        self._shared = None if parts.ulysses is None else parts.ulysses.part(self._sequences)
        self._own = self._sequences if self._shared is None else self._shared.sequences
        self._tokens = LiveTokens(self._own, uses if self._shared is None else self._shared.uses(uses))
        self._owners = Owners([use.low_rank for use in uses])
        self._beyond: tuple[Beyond, tuple[int, ...]] | None = None
        """The outside tokens, and of which sequences, that layers see instead of a stream's."""

    def run(self, text: Tensor, image: Tensor, answered: Tensor | None = None) -> Tensor:
        """Velocity of the regions' tokens, or of those that are `answered`.

        `text` is the text stream, (text_tokens, joint_dim), `image` the image stream of all tokens,
        (image_tokens, in_channels).
        """
        shared = self._shared
        if self._live_text is not None:
            text = text.index_select(0, self._live_text)
        if shared is not None:
            text, image = (text.index_select(0, shared.own.text), image.index_select(0, shared.own.image))
        with self._parts.low_ranks.acting(self._spans if self._owners else None):
            velocity = self._run(text, image)
        if shared is not None:
            velocity = shared.gathered(shared.shares.live(self._tokens.now.whole, text=False), velocity)
        return velocity if answered is None else velocity.index_select(0, answered)

    def _run(self, text: Tensor, image: Tensor) -> Tensor:
        model = self._transformer
        if not all(self._tokens.now.whole):
            image = image.index_select(0, self._tokens.now.image)
        image = model.x_embedder(image)
        text = model.context_embedder(text)
        for index, block in enumerate(model.transformer_blocks):
            with self._trace.span(Lane.COMPUTE, f"block {index}"):
                text, image = self._double_block(index, block, text, self._tokens.enter(index, image))
                image = self._tokens.add(index, image)
        joint = self._tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, len(model.transformer_blocks)):
            with self._trace.span(Lane.COMPUTE, f"block {index}"):
                joint = self._single_block(index, block, self._tokens.enter_joint(index, joint))
                joint = self._tokens.add_joint(index, joint)
        image = joint.index_select(0, self._tokens.now.layout.image_positions)
        image = self._tokens.leave(image)
        normed = self._parts.elementwise.modulated(
            image, self._modulation.output(), self._tokens.now.layout.image, model.norm_out.norm.eps
        )
        velocity: Tensor = model.proj_out(normed)
        return velocity

    def samples(self, text: Tensor, image: Tensor, hint: Tensor) -> Iterator[Tensor]:
        """Of a `FluxControlNetModel`: what it adds behind blocks, (live_tokens, inner_dim), block by block, unscaled.

        `text` is the embedded text stream, (text_tokens, inner_dim), with the embedding of a union's mode before each
        sequence's. `image` and `hint`, (image_tokens, in_channels) and (image_tokens, inner_dim), are of all tokens:
        latents, and what the network's `controlnet_x_embedder` makes of the control image.
        """
        model, doubles = self._transformer, len(self._transformer.transformer_blocks)
        if not all(self._tokens.now.whole):
            image, hint = (part.index_select(0, self._tokens.now.image) for part in (image, hint))
        image = model.x_embedder(image) + hint
        for index, block in enumerate(model.transformer_blocks):
            text, image = self._double_block(index, block, text, self._tokens.enter(index, image))
            yield model.controlnet_blocks[index](image)
        if not model.single_transformer_blocks:
            return
        joint = self._tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, doubles):
            joint = self._single_block(index, block, self._tokens.enter_joint(index, joint))
            pictures = joint.index_select(0, self._tokens.now.layout.image_positions)
            yield model.controlnet_single_blocks[index - doubles](pictures)

    # Blocks

    def _spans(self, path: str) -> Spans:
        """See :data:`giornata.packed.low_rank_hooks.Where`."""
        if self._beyond is not None:
            beyond, of = self._beyond
            return self._owners.over(beyond.segments.lengths, of)
        layout = self._tokens.now.layout
        if path.startswith("single_transformer_blocks."):
            return self._owners.over(layout.joint.lengths)
        return self._owners.over((layout.text if of_text(path) else layout.image).lengths)

    def _projections(self, joined: Joined, normed: Tensor) -> tuple[Tensor, ...]:
        """What joined layers make of (tokens, in_features)."""
        parts = joined(normed)
        self._parts.low_ranks.add_each(joined.layers, normed, parts)
        return parts

    def _double_block(self, index: int, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """`FluxTransformerBlock`: text and image stream with weights of their own and one attention."""
        layout, attn, each = self._tokens.now.layout, block.attn, self._parts.elementwise
        of_image, of_text = self._modulation.double(index)
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

    def _single_block(self, index: int, block: Any, joint: Tensor) -> Tensor:
        """`FluxSingleTransformerBlock`: attention and MLP side by side on the joint order."""
        attn, each, segments = block.attn, self._parts.elementwise, self._tokens.now.layout.joint
        shift, scale, gate = self._modulation.single(index)
        normed = each.modulated(joint, (shift, scale), segments, block.norm.norm.eps)
        joined = self._parts.projections.single[index - len(self._transformer.transformer_blocks)]
        *attending, mlp = self._projections(joined, normed)
        stream = _projected(attending, attn, attn.norm_q, attn.norm_k)
        outside = self._outside(index, attn, block.norm.norm.eps, (shift, scale))
        attended = self._attention(index, (stream,), outside)
        return each.gated(joint, block.proj_out(each.beside_gelu(attended, mlp)), gate, segments)

    def _attention(self, block: int, streams: Sequence[Projected], outside: Mapping[int, Beside]) -> Tensor:
        """Each sequence over its own keys: what its tokens project → (joint_tokens, inner_dim).

        The one place where a token meets others.
        """
        live, shared = self._tokens.now, self._shared
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
        for sequence, recorder in self._tokens.recorders.items():
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
            for sequence, taken in self._tokens.taken.items()
            if taken.modes[block] is Mode.KV
        }
        if self._tokens.hidden:
            sequences = tuple(self._tokens.hidden)
            beyond = self._own.beyond(sequences)
            each = self._parts.elementwise
            vectors = [vector.index_select(0, beyond.sequences) for vector in shift_scale]
            normed = each.modulated(
                torch.cat(list(self._tokens.hidden.values())), vectors, beyond.segments, eps
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
                sequence: Outside(key[start:end], value[start:end])
                for sequence, (start, end) in zip(sequences, bounds, strict=True)
            }
        padding = {sequence: of.keys_values(block) for sequence, of in self._padding.items()}
        both = {s: (outside[s], kept) if s in outside else kept for s, kept in padding.items()}
        return {**outside, **both}


def _projected(parts: Sequence[Tensor], attn: Any, query_norm: Any, key_norm: Any) -> Projected:
    """Query, key and value, (tokens, inner_dim) each, by head."""
    query, key, value = (_heads(part, attn) for part in parts)
    return Projected(query, key, value, _head_norm(query_norm), _head_norm(key_norm))


def _head_norm(norm: Any) -> HeadNorm:
    return HeadNorm(norm.weight, norm.eps)


def _heads(projected: Tensor, attn: Any) -> Tensor:
    """(tokens, inner_dim) → (tokens, heads, head_dim)."""
    tokens, width = projected.shape
    return projected.view(tokens, width // attn.head_dim, attn.head_dim)
