"""Flux transformers of diffusers over packed sequences: modulation, joined projections, blocks and forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn

from giornata.packed.attention import Apart, Attention, Beside, DenseKV
from giornata.packed.block_inputs import BlockInputs, KeysValues, KeysValuesRecorder
from giornata.packed.compute_set import CachedTokenSegments, ComputeSetStream, PackedBatch
from giornata.packed.elementwise import ElementwiseOps, HeadNorm, QKVProjection
from giornata.packed.low_rank import BatchLoras, LoraSpans, LowRankHooks, is_text_layer
from giornata.packed.packing import LaneTracer, Segments, TraceLane
from giornata.packed.sharding import ShardedBatch, Ulysses
from giornata.wire.values import BlockMode

# adaLN vectors of all steps of a sequence, each linear layer applied once: they depend on prompt and time
# alone.
#
# Computed step by step, a batch of one row reads the weights of these layers, a quarter of all, for a few
# vectors.


Vectors = tuple[Tensor, ...]
"""Modulation vectors of one adaLN layer, (sequences, inner_dim) each."""


def prepare_modulation(transformer: Any, conditioning: Tensor) -> Tensor:
    """(steps, vectors * inner_dim): the vectors of all layers, in the order in which :class:`Modulation` reads them.

    `conditioning`, (steps, inner_dim), is what the transformer embeds of prompt and time.
    """
    activated = torch.nn.functional.silu(conditioning)
    return torch.cat([layer(activated) for layer in _layers(transformer)], dim=1)


def modulation_channels(transformer: Any) -> int:
    """The width of :func:`prepared`."""
    return sum(layer.out_features for layer in _layers(transformer))


class Modulation:
    """The vectors of one forward, by layer.

    `of` are :func:`prepared` of each sequence, `steps` the step that each sequence makes.
    """

    def __init__(self, transformer: Any, of: Sequence[Tensor], steps: Sequence[int]) -> None:
        picked = [vectors[step : step + 1] for vectors, step in zip(of, steps, strict=True)]
        packed = picked[0] if len(picked) == 1 else torch.cat(picked)
        self._vectors: Vectors = torch.split(packed, transformer.inner_dim, dim=1)
        self._doubles = len(transformer.transformer_blocks)

    def double(self, block: int) -> tuple[Vectors, Vectors]:
        """Shift, scale and gate of the attention, then of the feed-forward: of the image and of the text stream."""
        start = 12 * block
        return self._vectors[start : start + 6], self._vectors[start + 6 : start + 12]

    def single(self, block: int) -> Vectors:
        """Shift, scale and gate; `block` counts double blocks too."""
        start = 9 * self._doubles + 3 * block
        return self._vectors[start : start + 3]

    def output(self) -> Vectors:
        """Shift and scale of the last norm."""
        scale, shift = self._vectors[-2:]
        return shift, scale


def _layers(transformer: Any) -> list[Any]:
    """The linear layers of all adaLN norms, in the order of the forward."""
    doubles = [
        norm.linear for block in transformer.transformer_blocks for norm in (block.norm1, block.norm1_context)
    ]
    singles = [block.norm.linear for block in transformer.single_transformer_blocks]
    last = getattr(transformer, "norm_out", None)  # of a ControlNet nothing follows the last block
    return [*doubles, *singles, *([] if last is None else [last.linear])]


# Projections of one input as one product: query, key and value, and the MLP beside them in single blocks.


class FusedLinear:
    """Linear layers of the same input, applied as one.

    Their weights are put into one tensor, and become views of it: nothing is kept twice, and each layer still works by
    itself. Whoever moves a layer elsewhere afterwards parts it from the others. Layers whose weights are no plain
    tensors, since they are quantised, are applied one after the other.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)
        self._weight: Tensor | None = None
        if any(type(layer.weight) not in {nn.Parameter, Tensor} for layer in layers):
            return
        self._widths = [layer.out_features for layer in layers]
        self._weight = torch.cat([layer.weight.detach() for layer in layers])
        self._bias = torch.cat([layer.bias.detach() for layer in layers])
        for layer, weight, bias in zip(
            layers,
            torch.split(self._weight, self._widths),
            torch.split(self._bias, self._widths),
            strict=True,
        ):
            layer.weight.data, layer.bias.data = weight, bias

    def __call__(self, entering: Tensor) -> tuple[Tensor, ...]:
        """Return what each layer makes of `entering`, (tokens, in_features): views, (tokens, out_features) each."""
        if self._weight is None:
            return tuple(F.linear(entering, layer.weight, layer.bias) for layer in self.layers)
        return F.linear(entering, self._weight, self._bias).split_with_sizes(self._widths, 1)


class FluxProjections:
    """The joined projections of every block of a `FluxTransformer2DModel`."""

    def __init__(self, transformer: Any) -> None:
        self.image = [
            FusedLinear((block.attn.to_q, block.attn.to_k, block.attn.to_v))
            for block in transformer.transformer_blocks
        ]
        """Query, key and value of double blocks."""
        self.text = [
            FusedLinear((block.attn.add_q_proj, block.attn.add_k_proj, block.attn.add_v_proj))
            for block in transformer.transformer_blocks
        ]
        """As `image`."""
        self.single = [
            FusedLinear((block.attn.to_q, block.attn.to_k, block.attn.to_v, block.proj_mlp))
            for block in transformer.single_transformer_blocks
        ]
        """Query, key, value and the MLP's first layer."""


# The blocks of `FluxTransformer2DModel` over packed sequences, and what these meet in attention beside
# themselves.


class FluxComponents(NamedTuple):
    """The parts that forwards are made of: a transformer, and what computes on tokens between its products."""

    transformer: Any
    projections: FluxProjections
    attend: Attention
    elementwise: ElementwiseOps
    low_ranks: LowRankHooks
    """Hooks of the transformer's layers, through which LoRAs act."""
    ulysses: Ulysses | None = None
    """This process's parts of batches that several compute together; None: it computes batches alone."""


class FluxBlocks:
    """The computed and the cached tokens of some sequences, and the blocks' operations on them.

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
        self._adapted = bool(self.owners)
        self._beyond: tuple[CachedTokenSegments, tuple[int, ...]] | None = None
        """The outside tokens, and of which sequences, that layers see instead of a stream's."""

    def spans(self, path: str) -> LoraSpans:
        """See :data:`giornata.packed.low_rank.Where`."""
        if self._beyond is not None:
            beyond, of = self._beyond
            return self.owners.over(beyond.segments.lengths, of)
        layout = self.tokens.now.layout
        if path.startswith("single_transformer_blocks."):
            return self.owners.over(layout.joint.lengths)
        return self.owners.over((layout.text if is_text_layer(path) else layout.image).lengths)

    def _projected(
        self, joined: FusedLinear, normed: Tensor, attn: Any, query_norm: Any, key_norm: Any
    ) -> tuple[QKVProjection, tuple[Tensor, ...]]:
        """Query, key and value that joined layers make of (tokens, in_features), by head, and what the others make."""
        parts = joined(normed)
        if self._adapted:
            self._parts.low_ranks.add_each(joined.layers, normed, parts)
        query, key, value, *others = parts
        shape = len(query), query.shape[1] // attn.head_dim, attn.head_dim
        return QKVProjection(
            query.view(shape),
            key.view(shape),
            value.view(shape),
            HeadNorm(query_norm.weight, query_norm.eps),
            HeadNorm(key_norm.weight, key_norm.eps),
        ), tuple(others)

    def double(self, index: int, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """`FluxTransformerBlock`: text and image stream with weights of their own and one attention."""
        layout, attn, each = self.tokens.now.layout, block.attn, self._parts.elementwise
        of_image, of_text = self.modulation.double(index)
        normed_text = each.modulated(text, of_text[:2], layout.text, block.norm1_context.norm.eps)
        normed_image = each.modulated(image, of_image[:2], layout.image, block.norm1.norm.eps)
        joined = self._parts.projections
        of_stream, _ = self._projected(
            joined.text[index], normed_text, attn, attn.norm_added_q, attn.norm_added_k
        )
        of_picture, _ = self._projected(joined.image[index], normed_image, attn, attn.norm_q, attn.norm_k)
        outside = self._outside(index, attn, block.norm1.norm.eps, of_image[:2])
        attended = self._attention(index, (of_stream, of_picture), outside)
        attended_text, attended_image = layout.split(attended)
        image = each.gated(image, attn.to_out[1](attn.to_out[0](attended_image)), of_image[2], layout.image)
        text = each.gated(text, attn.to_add_out(attended_text), of_text[2], layout.text)
        normed_text = each.modulated(text, of_text[3:5], layout.text, block.norm2_context.eps)
        normed_image = each.modulated(image, of_image[3:5], layout.image, block.norm2.eps)
        return (
            each.gated(text, block.ff_context(normed_text), of_text[5], layout.text),
            each.gated(image, block.ff(normed_image), of_image[5], layout.image),
        )

    def single(self, index: int, block: Any, joint: Tensor) -> Tensor:
        """`FluxSingleTransformerBlock`: attention and MLP side by side on the joint order."""
        attn, each, segments = block.attn, self._parts.elementwise, self.tokens.now.layout.joint
        shift, scale, gate = self.modulation.single(index)
        normed = each.modulated(joint, (shift, scale), segments, block.norm.norm.eps)
        joined = self._parts.projections.single[index - len(self._transformer.transformer_blocks)]
        stream, (mlp,) = self._projected(joined, normed, attn, attn.norm_q, attn.norm_k)
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
        if self.tokens.recorders or self._padding_recorders:
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

    def _outside(self, block: int, attn: Any, eps: float, shift_scale: Vectors) -> Mapping[int, Beside]:
        """Keys and values of tokens that are not live, by sequence: of the picture, and of padding.

        `eps` is that of the image stream's norm before the attention `attn`; `shift_scale` follows it, (sequences,
        inner_dim) each.
        """
        plan = self.tokens.plan
        outside = plan.outside.get(block)
        if outside is None:
            outside = plan.outside[block] = self._kept(block)
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
            heads = projected[0].shape[1] // attn.head_dim
            key, value = (part.view(len(part), heads, attn.head_dim) for part in projected)
            key = each.rotated(key, HeadNorm(attn.norm_k.weight, attn.norm_k.eps), beyond.rotary)
            bounds = beyond.segments.bounds
            if self._shared is not None:
                order = self._shared.shares.beyond(sequences)
                bounds = order.segments.bounds
                key, value = self._shared.to_heads(order, (key, value))
            outside = dict(outside)
            for sequence, (start, end) in zip(sequences, bounds, strict=True):
                made, padding = DenseKV(key[start:end], value[start:end]), outside.get(sequence)
                outside[sequence] = made if padding is None or isinstance(padding, tuple) else (made, padding)
        return outside

    def _kept(self, block: int) -> dict[int, Beside]:
        """The same of what is kept as keys and values; a block projects others from hidden states."""
        found: dict[int, Apart] = {
            sequence: taken.source.keys_values(block)
            for sequence, taken in self.tokens.taken.items()
            if taken.modes[block] is BlockMode.KV
        }
        padding = {sequence: of.keys_values(block) for sequence, of in self._padding.items()}
        both = {s: (found[s], kept) if s in found else kept for s, kept in padding.items()}
        return {**found, **both}


# One forward of `FluxTransformer2DModel` over packed sequences; some take part of it from a template.
#
# Its linear layers are called as they are, or several as one product; what happens between them is that of
# `giornata.packed.elementwise`, and the attention is over each sequence's own keys. Without templates it
# equals the module's own `forward` of each sequence alone.


class FluxForward:
    """One forward over `sequences`.

    `modulation` is that of the sequences' steps. `uses` are by sequence, and empty
    where no sequence uses anything.
    """

    def __init__(
        self,
        parts: FluxComponents,
        sequences: PackedBatch,
        modulation: Modulation,
        uses: Sequence[BlockInputs],
        *,
        trace: LaneTracer,
    ) -> None:
        self._parts, self._transformer, self._trace = parts, parts.transformer, trace
        taken = tuple(s for s, use in enumerate(uses) if use.padding is not None)
        unpadded = sequences.without_padding(taken) if taken else None
        present = sequences if unpadded is None else unpadded.sequences
        self._live_text = None if unpadded is None else unpadded.text
        self._shared = None if parts.ulysses is None else parts.ulysses.part(present)
        padding = dict(enumerate(sequences.padding))
        self._over = FluxBlocks(parts, present, modulation, uses, padding, self._shared)

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
        with self._parts.low_ranks.acting(self._over.spans if self._over.owners else None):
            velocity = self._run(text, image)
        if shared is not None:
            velocity = shared.gathered(shared.shares.live(self._over.tokens.now.whole, text=False), velocity)
        return velocity if answered is None else velocity.index_select(0, answered)

    def _run(self, text: Tensor, image: Tensor) -> Tensor:
        model, over = self._transformer, self._over
        if not all(over.tokens.now.whole):
            image = image.index_select(0, over.tokens.now.image)
        image = model.x_embedder(image)
        text = model.context_embedder(text)
        image = self._blocks(text, image)
        normed = self._parts.elementwise.modulated(
            image, over.modulation.output(), over.tokens.now.layout.image, model.norm_out.norm.eps
        )
        velocity: Tensor = model.proj_out(normed)
        return velocity

    def _blocks(self, text: Tensor, image: Tensor) -> Tensor:
        """The regions' tokens behind the last block, of the streams that enter the first."""
        model, over, tokens = self._transformer, self._over, self._over.tokens
        doubles = len(model.transformer_blocks)
        for index, block in enumerate(model.transformer_blocks):
            with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                text, image = over.double(index, block, text, tokens.enter(index, image))
                if tokens.residuals:
                    image = tokens.add(index, image)
        joint = tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, doubles):
            with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                joint = over.single(index, block, tokens.enter_joint(index, joint))
                if tokens.residuals:
                    joint = tokens.add_joint(index, joint)
        return tokens.leave(joint.index_select(0, tokens.now.layout.image_positions))

    def samples(self, text: Tensor, image: Tensor, hint: Tensor) -> Iterator[Tensor]:
        """Return what a `FluxControlNetModel` adds behind each block in turn, (live_tokens, inner_dim), unscaled.

        `text` is the embedded text stream, (text_tokens, inner_dim), with the embedding of a union's mode before each
        sequence's. `image` and `hint`, (image_tokens, in_channels) and (image_tokens, inner_dim), are of all tokens:
        latents, and what the network's `controlnet_x_embedder` makes of the control image.
        """
        over, tokens = self._over, self._over.tokens
        model, doubles = self._transformer, len(self._transformer.transformer_blocks)
        if not all(tokens.now.whole):
            image, hint = (part.index_select(0, tokens.now.image) for part in (image, hint))
        image = model.x_embedder(image) + hint
        for index, block in enumerate(model.transformer_blocks):
            text, image = over.double(index, block, text, tokens.enter(index, image))
            yield model.controlnet_blocks[index](image)
        if not model.single_transformer_blocks:
            return
        joint = tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, doubles):
            joint = over.single(index, block, tokens.enter_joint(index, joint))
            pictures = joint.index_select(0, tokens.now.layout.image_positions)
            yield model.controlnet_single_blocks[index - doubles](pictures)
