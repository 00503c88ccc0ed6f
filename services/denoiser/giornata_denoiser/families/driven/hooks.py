"""What is changed of a transformer so that its blocks serve packed sequences: who modulates, and how tokens attend.

Every token is an item of length 1: hidden states are (tokens, 1, channels), and a block's own `gate.unsqueeze(1) * x`
broadcasts once the vectors of a sequence are spread to its tokens. The vectors of all steps are made when a row joins,
so that no step reads the weights of modulation layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from giornata.packed.elementwise import rotate
from giornata_denoiser.families.driven.forward import Forward, Site, Stream

Activation = Callable[[Tensor], Tensor]


class Hooks:
    """The hooks of one transformer, and the forward that they read: one at a time, on the thread that predicts."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._layers: list[tuple[nn.Module, Activation]] = []
        self.width = 0
        """Channels of all vectors of one step."""

    @property
    def forward(self) -> Forward:
        """The present forward.

        Raises:
            RuntimeError: a module runs outside of :meth:`running`.
        """
        if self._forward is None:
            raise RuntimeError("a driven block runs within a forward alone")
        return self._forward

    @contextmanager
    def running(self, forward: Forward) -> Iterator[Forward]:
        """Have the hooks read `forward`."""
        self._forward = forward
        try:
            yield forward
        finally:
            self._forward = None

    def spread(self, parent: Any, name: str, stream: Stream, activation: Activation = nn.Identity()) -> None:  # noqa: B008 - stateless
        """Let the modulation layer `name` of `parent` answer with prepared vectors of `stream`.

        `activation` is what the parent does to the embedding before the layer.
        """
        layer = getattr(parent, name)
        self._layers.append((layer, activation))
        setattr(parent, name, Spread(self, layer, self.take(_out_features(layer)), stream))

    def spread_argument(self, norm: Any, parts: int, width: int, stream: Stream) -> None:
        """Give `norm` its argument `emb`, (tokens, parts, width), from prepared vectors that no layer makes."""
        start = self.take(parts * width)

        def given(_: object, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            vectors = self.forward.vectors(start, parts * width, stream)
            return args, named | {"emb": vectors.view(-1, parts, width)}

        norm.register_forward_pre_hook(given, with_kwargs=True)

    def take(self, width: int) -> int:
        """Where the next `width` channels of a step's vectors begin."""
        start, self.width = self.width, self.width + width
        return start

    def vectors(self, embedding: Tensor) -> Tensor:
        """(steps, width): what all spread layers make of (steps, channels), in order."""
        return torch.cat([layer(activation(embedding)) for layer, activation in self._layers], dim=1)

    def rotated(self, heads: Tensor, stream: Stream) -> Tensor:
        """(tokens, heads, head_dim) at the positions of their tokens."""
        rotary = self.forward.rotary(stream)
        return heads if rotary is None else rotate(heads, rotary)


class Spread(nn.Module):
    """Stands where a modulation layer stood: the layer's vectors of every sequence's step, spread to tokens."""

    def __init__(self, hooks: Hooks, layer: nn.Module, start: int, stream: Stream) -> None:
        super().__init__()
        self.layer = layer
        self._hooks, self._start, self._width, self._stream = hooks, start, _out_features(layer), stream

    def forward(self, _: Tensor) -> Tensor:
        """(tokens, width), or (1, width) where there is one sequence."""
        return self._hooks.forward.vectors(self._start, self._width, self._stream)


class JointAttention:
    """Attention of two streams with projections of their own: a processor of diffusers' attention modules."""

    def __init__(self, hooks: Hooks, site: Site) -> None:
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
        hooks, layout = self._hooks, self._hooks.forward.live.layout
        image = projected(attn, hidden_states)
        text = (
            by_head(attn, attn.add_q_proj(encoder_hidden_states), attn.norm_added_q),
            by_head(attn, attn.add_k_proj(encoder_hidden_states), attn.norm_added_k),
            by_head(attn, attn.add_v_proj(encoder_hidden_states)),
        )
        query, key, value = (layout.join(*parts) for parts in zip(text, image, strict=True))
        query, key = hooks.rotated(query, Stream.JOINT), hooks.rotated(key, Stream.JOINT)
        attended = hooks.forward.attended(self._site, Stream.JOINT, query, key, value)
        of_text, of_image = layout.split(attended)
        to_text = attn.to_add_out
        return attn.to_out[0](of_image), of_text if to_text is None else to_text(of_text)


class SelfAttention:
    """Attention of one stream: a processor of diffusers' attention modules."""

    def __init__(self, hooks: Hooks, site: Site, stream: Stream) -> None:
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
        attended = self.attended(*projected(attn, hidden_states))
        to_out = getattr(attn, "to_out", None)
        return attended if to_out is None else to_out[0](attended)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(tokens, heads, head_dim) each, normed → (tokens, 1, channels)."""
        hooks, stream = self._hooks, self._stream
        query, key = hooks.rotated(query, stream), hooks.rotated(key, stream)
        return hooks.forward.attended(self._site, stream, query, key, value)


def projected(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of (tokens, 1, channels): (tokens, heads, head_dim) each, the first two normed."""
    return (
        by_head(attn, attn.to_q(hidden), attn.norm_q),
        by_head(attn, attn.to_k(hidden), attn.norm_k),
        by_head(attn, attn.to_v(hidden)),
    )


def by_head(attn: Any, projection: Tensor, norm: Any = None) -> Tensor:
    """(tokens, 1, channels) → (tokens, heads, head_dim), normed if there is a norm."""
    heads = projection.view(len(projection), attn.heads, -1)
    return heads if norm is None else norm(heads)


def _out_features(layer: nn.Module) -> int:
    """Of the last linear layer of a modulation layer."""
    *_, last = (module for module in layer.modules() if isinstance(module, nn.Linear))
    return last.out_features
