"""Flux transformers of diffusers over packed sequences: modulation, joined projections, blocks and forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn

from giornata.packed.attention import Attention, ElementwiseOps, HeadNorm, QKVProjection
from giornata.packed.forward import AttentionSite, PackedForward, TokenStream
from giornata.packed.low_rank import LoraSpans, LowRankHooks, is_text_layer
from giornata.packed.packing import BlockInputs, LaneTracer, PackedBatch
from giornata.packed.sharding import Ulysses

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


# One forward of `FluxTransformer2DModel`: its linear layers are called as they are, or several as one product; what
# happens between them is that of `giornata.packed.attention`. Without templates it equals the module's own `forward`
# of each sequence alone.


class FluxComponents(NamedTuple):
    """The parts that forwards are made of: a transformer, and what computes on tokens between its products."""

    transformer: Any
    projections: FluxProjections
    attend: Attention
    elementwise: ElementwiseOps
    low_ranks: LowRankHooks
    """Hooks of the transformer's layers, through which LoRAs act."""


class FluxForward(PackedForward):
    """One forward over `sequences`, with the `modulation` of their steps.

    `uses` are by sequence, and empty where no sequence uses anything; `ulysses` are this process's parts of batches
    that several compute together.
    """

    def __init__(
        self,
        parts: FluxComponents,
        sequences: PackedBatch,
        modulation: Modulation,
        uses: Sequence[BlockInputs],
        *,
        trace: LaneTracer,
        ulysses: Ulysses | None = None,
    ) -> None:
        taken = tuple(s for s, use in enumerate(uses) if use.padding is not None)
        present, live_text = sequences.without_padding(taken) if taken else (sequences, None)
        self._live_text: Tensor | None = live_text
        super().__init__(present, uses, parts.attend, None if ulysses is None else ulysses.part(present))
        self._parts, self._transformer, self._trace = parts, parts.transformer, trace
        self.modulation, self._adapted = modulation, bool(self.owners)

    def run(self, text: Tensor, image: Tensor, answered: Tensor | None = None) -> Tensor:
        """Velocity of the regions' tokens, or of those that are `answered`.

        `text` is the text stream, (text_tokens, joint_dim), `image` the image stream of all tokens,
        (image_tokens, in_channels).
        """
        shared, tokens, model = self._shared, self.tokens, self._transformer
        if self._live_text is not None:
            text = text.index_select(0, self._live_text)
        if shared is not None:
            text, image = text.index_select(0, shared.text), image.index_select(0, shared.image)
        if not all(tokens.now.whole):
            image = image.index_select(0, tokens.now.image)
        with self._parts.low_ranks.acting(self._spans_of if self._adapted else None):
            image, text = model.x_embedder(image), model.context_embedder(text)
            pairs, singles = model.transformer_blocks, model.single_transformer_blocks
            image = self.passed(pairs, singles, self.double, self.single, text, image, self._trace)
            normed = self._parts.elementwise.modulated(
                image, self.modulation.output(), tokens.now.layout.image, model.norm_out.norm.eps
            )
            velocity: Tensor = model.proj_out(normed)
        if shared is not None:
            velocity = shared.gathered(shared.live(tokens.now.whole, text=False), velocity)
        return velocity if answered is None else velocity.index_select(0, answered)

    def samples(self, text: Tensor, image: Tensor, hint: Tensor) -> Iterator[Tensor]:
        """Return what a `FluxControlNetModel` adds behind each block in turn, (live_tokens, inner_dim), unscaled.

        `text` is the embedded text stream, (text_tokens, inner_dim), with the embedding of a union's mode before each
        sequence's. `image` and `hint`, (image_tokens, in_channels) and (image_tokens, inner_dim), are of all tokens:
        latents, and what the network's `controlnet_x_embedder` makes of the control image.
        """
        model, tokens = self._transformer, self.tokens
        image = model.x_embedder(image) + hint
        for index, block in enumerate(model.transformer_blocks):
            text, image = self.double(index, block, text, image)
            yield model.controlnet_blocks[index](image)
        if not model.single_transformer_blocks:
            return
        joint = tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, len(model.transformer_blocks)):
            joint = self.single(index, block, joint)
            pictures = joint.index_select(0, tokens.now.layout.image_positions)
            yield model.controlnet_single_blocks[index - len(model.transformer_blocks)](pictures)

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
        if self.tokens.hidden:
            self._project(attn, block.norm1.norm.eps, of_image[:2])
        query, key, value = each.attended((of_stream, of_picture), layout, self.tokens.now.rotary)
        attended = self.attended(AttentionSite(index), TokenStream.JOINT, query, key, value)
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
        attn, each, live = block.attn, self._parts.elementwise, self.tokens.now
        segments = live.layout.joint
        shift, scale, gate = self.modulation.single(index)
        normed = each.modulated(joint, (shift, scale), segments, block.norm.norm.eps)
        joined = self._parts.projections.single[index - len(self._transformer.transformer_blocks)]
        stream, (mlp,) = self._projected(joined, normed, attn, attn.norm_q, attn.norm_k)
        if self.tokens.hidden:
            self._project(attn, block.norm.norm.eps, (shift, scale))
        query, key, value = each.attended((stream,), live.layout, live.rotary)
        attended = self.attended(AttentionSite(index), TokenStream.JOINT, query, key, value)
        return each.gated(joint, block.proj_out(each.beside_gelu(attended, mlp)), gate, segments)

    def _projected(
        self, joined: FusedLinear, normed: Tensor, attn: Any, query_norm: Any, key_norm: Any
    ) -> tuple[QKVProjection, tuple[Tensor, ...]]:
        """Query, key and value that joined layers make of (tokens, in_features), by head, and what the others make."""
        parts = joined(normed)
        if self._adapted:
            for layer, part in zip(joined.layers, parts, strict=True):
                self._parts.low_ranks.add(layer, normed, part)
        query, key, value, *others = parts
        shape = len(query), query.shape[1] // attn.head_dim, attn.head_dim
        return QKVProjection(
            query.view(shape),
            key.view(shape),
            value.view(shape),
            HeadNorm(query_norm.weight, query_norm.eps),
            HeadNorm(key_norm.weight, key_norm.eps),
        ), tuple(others)

    def _project(self, attn: Any, eps: float, shift_scale: Vectors) -> None:
        """Keys and values of outside tokens whose hidden state enters the block.

        `eps` is that of the image stream's norm before the attention `attn`; `shift_scale` follows it, (sequences,
        inner_dim) each.
        """
        each, (shift, scale), hidden = self._parts.elementwise, shift_scale, self.tokens.hidden
        beyond = self._beyond = self._own.beyond(tuple(hidden))
        vectors = shift.index_select(0, beyond.sequences), scale.index_select(0, beyond.sequences)
        normed = each.modulated(torch.cat(list(hidden.values())), vectors, beyond.segments, eps)
        key, value = attn.to_k(normed), attn.to_v(normed)
        self._beyond = None
        shape = len(key), key.shape[1] // attn.head_dim, attn.head_dim
        norm = HeadNorm(attn.norm_k.weight, attn.norm_k.eps)
        self.keep([(each.rotated(key.view(shape), norm, beyond.rotary), value.view(shape))])

    def _spans_of(self, path: str) -> LoraSpans:
        """See :data:`giornata.packed.low_rank.Where`."""
        if path.startswith("single_transformer_blocks."):
            return self.spans(TokenStream.JOINT)
        return self.spans(TokenStream.TEXT if is_text_layer(path) else TokenStream.IMAGE)
