"""One forward of `FluxTransformer2DModel` over packed sequences; some take part of it from a template.

Its sub-modules are called as they are; only what mixes tokens or sequences is written here: the modulation, computed
per sequence and gathered per token, and the attention, over each sequence's own keys. Without templates it equals the
module's own `forward` of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from giornata.packed.attention import Attention, Outside
from giornata.packed.packing import Segments
from giornata.packed.region import Live, Rotary, Sequences
from giornata.packed.tracing import Lane, Tracing
from giornata.packed.uses import Taken, Use
from giornata.wire.values import Mode
from giornata_denoiser.families.flux.modulation import Modulation, Vectors


class FluxForward:
    """The state of one forward: which tokens are live, and what the others are.

    `modulation` is that of the sequences' steps. `uses` are by sequence, and empty
    where no sequence uses anything.
    """

    def __init__(
        self,
        transformer: Any,
        attend: Attention,
        sequences: Sequences,
        modulation: Modulation,
        uses: Sequence[Use],
        *,
        trace: Tracing,
    ) -> None:
        self._transformer, self._attend, self._trace = transformer, attend, trace
        self._sequences, self._modulation = sequences, modulation
        self._taken = {s: use.taken for s, use in enumerate(uses) if use.taken is not None}
        self._recorders = {s: use.recorder for s, use in enumerate(uses) if use.recorder is not None}
        # A block that needs the hidden state of outside tokens makes it from their latents, where it is the first.
        self._live = self._live_where(lambda taken: taken.modes[0] is not Mode.KV)
        self._hidden: dict[int, Tensor] = {}
        """(outside, inner_dim) by sequence: what the present block projects keys and values of."""

    def run(self, text: Tensor, image: Tensor) -> Tensor:
        """Velocity of the regions' tokens.

        `text` is the text stream, (text_tokens, joint_dim), `image` the image stream of all tokens,
        (image_tokens, in_channels).
        """
        model = self._transformer
        if not all(self._live.whole):
            image = image.index_select(0, self._live.image)
        image = model.x_embedder(image)
        text = model.context_embedder(text)
        for index, block in enumerate(model.transformer_blocks):
            with self._trace.span(Lane.COMPUTE, f"block {index}"):
                text, image = self._double_block(index, block, text, self._entering(index, image))
        joint = self._live.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, len(model.transformer_blocks)):
            with self._trace.span(Lane.COMPUTE, f"block {index}"):
                joint = self._single_block(index, block, self._entering_joint(index, joint))
        image = joint.index_select(0, self._live.layout.image_positions)
        regions_alone = self._sequences.live((False,) * len(self._sequences.regions))
        image = self._converted(image, regions_alone, -1)  # no block: no token joins
        modulation = PerToken(self._modulation.output(), self._live.layout.image)
        velocity: Tensor = model.proj_out(modulation.modulated(model.norm_out.norm(image), 0))
        return velocity

    # Which tokens are live

    def _live_in(self, block: int) -> Live:
        return self._live_where(lambda taken: taken.modes[block] is Mode.FULL)

    def _live_where(self, whole: Callable[[Taken], bool]) -> Live:
        count = len(self._sequences.regions)
        return self._sequences.live(
            tuple(s not in self._taken or whole(self._taken[s]) for s in range(count))
        )

    def _entering(self, block: int, image: Tensor) -> Tensor:
        """The image stream as `block` computes it; keeps what it needs of other tokens, and what is recorded."""
        if not self._taken and not self._recorders:
            return image
        spans = self._live.layout.image.bounds
        self._hidden = {
            sequence: self._outside_of(image[slice(*spans[sequence])], sequence, block)
            for sequence, taken in self._taken.items()
            if taken.modes[block] is Mode.HIDDEN
        }
        image = self._converted(image, self._live_in(block), block)
        spans = self._live.layout.image.bounds
        for sequence, recorder in self._recorders.items():
            recorder.hidden(block, image[slice(*spans[sequence])])
        return image

    def _outside_of(self, image: Tensor, sequence: int, block: int) -> Tensor:
        """(outside, inner_dim): the input of `block` at the outside tokens; `image` is what is live of the sequence."""
        region = self._sequences.regions[sequence]
        if region is None or not self._live.whole[sequence]:
            return self._taken[sequence].source.hidden(block)
        return image.index_select(0, region.outside)

    def _entering_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`_entering` for the joint order."""
        if (
            not self._recorders
            and self._live is self._live_in(block)
            and not any(taken.modes[block] is Mode.HIDDEN for taken in self._taken.values())
        ):
            self._hidden = {}
            return joint
        text, image = self._live.layout.split(joint)
        image = self._entering(block, image)
        return self._live.layout.join(text, image)

    def _converted(self, image: Tensor, wanted: Live, block: int) -> Tensor:
        """The image stream with the tokens of `wanted`, which are live from now on.

        Tokens that join are those of the input of `block`, as the template had them.
        """
        before, self._live = self._live, wanted
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
                whole = part.new_empty(len(region.computed) + len(region.outside), part.shape[1])
                whole[region.computed] = part
                whole[region.outside] = self._taken[sequence].source.hidden(block)
                parts[sequence] = whole
        return torch.cat(parts)

    # Blocks

    def _double_block(self, index: int, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """`FluxTransformerBlock`: text and image stream with weights of their own and one attention."""
        layout, attn = self._live.layout, block.attn
        vectors, of_text = self._modulation.double(index)
        image_mod, text_mod = PerToken(vectors, layout.image), PerToken(of_text, layout.text)
        normed_text = text_mod.modulated(block.norm1_context.norm(text), 0)
        normed_image = image_mod.modulated(block.norm1.norm(image), 0)
        attended = self._attention(
            index,
            layout.join(
                attn.norm_added_q(_heads(attn.add_q_proj(normed_text), attn)),
                attn.norm_q(_heads(attn.to_q(normed_image), attn)),
            ),
            layout.join(
                attn.norm_added_k(_heads(attn.add_k_proj(normed_text), attn)),
                attn.norm_k(_heads(attn.to_k(normed_image), attn)),
            ),
            layout.join(_heads(attn.add_v_proj(normed_text), attn), _heads(attn.to_v(normed_image), attn)),
            self._outside(index, attn, block.norm1.norm, vectors[:2]),
        )
        attended_text, attended_image = layout.split(attended)
        image = image + image_mod.times(attn.to_out[1](attn.to_out[0](attended_image)), 2)
        text = text + text_mod.times(attn.to_add_out(attended_text), 2)
        return (
            _feed_forward(text, block.norm2_context, block.ff_context, text_mod),
            _feed_forward(image, block.norm2, block.ff, image_mod),
        )

    def _single_block(self, index: int, block: Any, joint: Tensor) -> Tensor:
        """`FluxSingleTransformerBlock`: attention and MLP side by side on the joint order."""
        attn = block.attn
        vectors = self._modulation.single(index)
        modulation = PerToken(vectors, self._live.layout.joint)
        normed = modulation.modulated(block.norm.norm(joint), 0)
        query, key, value = (_heads(project(normed), attn) for project in (attn.to_q, attn.to_k, attn.to_v))
        outside = self._outside(index, attn, block.norm.norm, vectors[:2])
        attended = self._attention(index, attn.norm_q(query), attn.norm_k(key), value, outside)
        mlp = block.act_mlp(block.proj_mlp(normed))
        return joint + modulation.times(block.proj_out(torch.cat((attended, mlp), dim=1)), 2)

    def _attention(
        self, block: int, query: Tensor, key: Tensor, value: Tensor, outside: Mapping[int, Outside]
    ) -> Tensor:
        """Each sequence over its own keys: (joint_tokens, heads, head_dim) → (joint_tokens, inner_dim).

        The one place where a token meets others.
        """
        segments = self._live.layout.joint
        query, key = _rotate(query, self._live.rotary), _rotate(key, self._live.rotary)
        for sequence, recorder in self._recorders.items():
            start, end = segments.bounds[sequence]
            picture = slice(start + self._sequences.layout.text.lengths[sequence], end)
            recorder.keys_values(block, key[picture], value[picture])
        return self._attend(query, key, value, segments, outside).flatten(1)

    def _outside(self, block: int, attn: Any, norm: Any, shift_scale: Vectors) -> dict[int, Outside]:
        """Keys and values of tokens that are not live, by sequence.

        `norm` is the image stream's before the attention `attn`; `shift_scale` follows it, (sequences, inner_dim) each.
        """
        outside = {
            sequence: taken.source.keys_values(block)
            for sequence, taken in self._taken.items()
            if taken.modes[block] is Mode.KV
        }
        if self._hidden:
            sequences = tuple(self._hidden)
            beyond = self._sequences.beyond(sequences)
            modulation = PerToken(
                tuple(vector.index_select(0, beyond.sequences) for vector in shift_scale), beyond.segments
            )
            normed = modulation.modulated(norm(torch.cat(list(self._hidden.values()))), 0)
            key = _rotate(attn.norm_k(_heads(attn.to_k(normed), attn)), beyond.rotary)
            value = _heads(attn.to_v(normed), attn)
            outside |= {
                sequence: Outside(key[start:end], value[start:end])
                for sequence, (start, end) in zip(sequences, beyond.segments.bounds, strict=True)
            }
        return outside


class PerToken:
    """Applies vectors of sequences to the packed tokens of these sequences.

    The vectors are shift, scale and gate, once or twice. A CPU computes each sequence by itself; a GPU gathers a vector
    for every token, in one kernel.
    """

    def __init__(self, vectors: Vectors, segments: Segments) -> None:
        self._vectors, self._segments = vectors, segments

    def modulated(self, normed: Tensor, first: int) -> Tensor:
        """normed * (1 + scale) + shift, (tokens, inner_dim), by the vectors from `first` on."""
        shift, scale = self._vectors[first : first + 2]
        return self._each(self._each(normed, 1 + scale, torch.mul), shift, torch.add)

    def times(self, values: Tensor, which: int) -> Tensor:
        """values * vector `which`, (tokens, inner_dim)."""
        return self._each(values, self._vectors[which], torch.mul)

    def _each(self, values: Tensor, vectors: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        if len(vectors) == 1:
            return combine(values, vectors)
        if values.device.type != "cpu":
            return combine(values, vectors.index_select(0, self._segments.sequence))
        out = torch.empty_like(values)
        for vector, (start, end) in zip(vectors, self._segments.bounds, strict=True):
            combine(values[start:end], vector, out=out[start:end])
        return out


def _feed_forward(hidden: Tensor, norm: Any, feed_forward: Any, modulation: PerToken) -> Tensor:
    """The residual MLP of a double block."""
    return hidden + modulation.times(feed_forward(modulation.modulated(norm(hidden), 3)), 5)


def _heads(projected: Tensor, attn: Any) -> Tensor:
    """(tokens, inner_dim) → (tokens, heads, head_dim)."""
    return projected.view(len(projected), -1, attn.head_dim)


def _rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim), by diffusers' own function."""
    rotated: Tensor = apply_rotary_emb(heads.unsqueeze(0), rotary, sequence_dim=1)
    return rotated.squeeze(0)
