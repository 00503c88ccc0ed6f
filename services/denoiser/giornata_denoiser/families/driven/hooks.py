"""What is changed of a transformer so that its blocks serve packed sequences: who modulates, and how tokens attend.

Blocks see hidden states as a batch, (items, tokens of each, channels), and a block's own `gate.unsqueeze(1) * x`
broadcasts one vector an item. Sequences of one length are the items. Where lengths differ, every token is an item of
its own, and the vectors of a sequence are spread to its tokens. The vectors of all steps are made when a row joins, so
that no step reads the weights of modulation layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from giornata.packed.elementwise import rotate
from giornata_denoiser.families.driven.forward import ForwardContext, TokenStream

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
        """Where the next `width` channels of a step's vectors begin."""
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
