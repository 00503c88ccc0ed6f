"""The hooks of a driven transformer: what modulates its blocks, and how their tokens attend in packed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from giornata.packed.attention import Attention, rotate, turns_of
from giornata.packed.forward import AttentionSite, PackedForward, Prefilled, TokenStream
from giornata.packed.packing import BlockInputs, PackedBatch, Segments
from giornata.packed.sharding import ShardedBatch


class CleanTokens(NamedTuple):
    """Companions that see timestep 0 in every step: clean pictures."""

    vectors: Tensor
    """(sequences, width): their modulation."""
    counts: tuple[int, ...]
    """How many each sequence has behind its picture's tokens."""


class DrivenForward(PackedForward):
    """One forward, and its modulation: `vectors`, (sequences, width), of each sequence's step.

    `clean` is there where companions have a modulation of their own; the rest is as :class:`PackedForward` has it.
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
        super().__init__(sequences, uses, attend, shared, prefixes, output)
        self._vectors, self._clean = vectors, clean

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


@lru_cache(maxsize=64)
def _set_apart(lengths: tuple[int, ...], behind: tuple[int, ...], device: torch.device | str) -> Segments:
    """Two segments of each sequence: its tokens without the last, so many ones `behind`, and these."""
    pairs = ((length - last, last) for length, last in zip(lengths, behind, strict=True))
    return Segments(tuple(tokens for pair in pairs for tokens in pair), device)


# Blocks see hidden states as a batch, (items, tokens of each, channels), and a block's own `gate.unsqueeze(1) * x`
# broadcasts one vector an item. Sequences of one length are the items. Where lengths differ, every token is an item of
# its own, and the vectors of a sequence are spread to its tokens. The vectors of all steps are made when a row joins:
# no step reads the weights of modulation layers.


Activation = Callable[[Tensor], Tensor]


class NoForward:
    """No forward is under way; stands where a :class:`DrivenForward` stands."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a driven block runs within a forward alone")


class TransformerHooks:
    """The hooks of one transformer, and the forward that they read: one at a time, on the thread that predicts."""

    def __init__(self) -> None:
        self.forward = cast("DrivenForward", NoForward())
        """The present forward."""
        self._layers: list[tuple[nn.Module, Activation]] = []
        self.width = 0
        """Channels of all vectors of one step."""

    @contextmanager
    def running(self, forward: DrivenForward) -> Iterator[DrivenForward]:
        """Have the hooks read `forward`, and what they read before again afterwards."""
        before, self.forward = self.forward, forward
        try:
            yield forward
        finally:
            self.forward = before

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
        return heads if rotary is None else rotate(heads, turns_of(rotary))


class PrecomputedModulation(nn.Module):
    """Stands where a modulation layer stood: the layer's vectors of every sequence's step, spread to tokens."""

    def __init__(self, hooks: TransformerHooks, layer: nn.Module, start: int, stream: TokenStream) -> None:
        super().__init__()
        self.layer = layer
        self._hooks, self._start, self._width, self._stream = hooks, start, _out_features(layer), stream

    def forward(self, _: Tensor) -> Tensor:
        """(items, width): see :meth:`DrivenForward.batched`."""
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
