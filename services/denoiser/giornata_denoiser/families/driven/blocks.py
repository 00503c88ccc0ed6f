"""The blocks of a driven transformer, one after the other, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from giornata.packed.tracing import LaneTracer, TraceLane
from giornata_denoiser.families.driven.forward import ForwardContext, TokenStream
from giornata_denoiser.families.driven.hooks import TransformerHooks

Both = tuple[Tensor, Tensor]
"""Text and image stream, (tokens, channels) each: the live tokens."""


class BlockwiseNetwork(Protocol):
    """What blocks ask of their network: see :class:`giornata_denoiser.families.driven.network.DrivenNetwork`."""

    pairs: Sequence[Any]
    singles: Sequence[Any]
    hooks: TransformerHooks

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """One block of two streams."""

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """One block of the joint stream."""

    def attentions(self, block: Any) -> Sequence[Any]:
        """A block's attentions, in order."""

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """What each of a block's attentions projects of its image stream."""

    def keys_values(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """What an attention projects, unturned."""


class BlockRunner:
    """Those of one `forward`."""

    def __init__(self, network: BlockwiseNetwork, forward: ForwardContext, trace: LaneTracer) -> None:
        self._network, self._forward, self._trace = network, forward, trace

    def passed(self, text: Tensor, image: Tensor) -> Tensor:
        """The image stream behind the last block, (live_tokens, channels), of both streams before the first."""
        pairs, singles, tokens = self._network.pairs, self._network.singles, self._forward.tokens
        for index, block in enumerate(pairs):
            with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                text, image = self._pair(block, text, tokens.enter(index, image))
                image = tokens.add(index, image)
        if singles:
            joint = tokens.now.layout.join(text, image)
            for index, block in enumerate(singles, len(pairs)):
                with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                    joint = self._single(block, tokens.enter_joint(index, joint))
                    joint = tokens.add_joint(index, joint)
            image = tokens.now.layout.split(joint)[1]
        return image

    def _pair(self, block: Any, text: Tensor, image: Tensor) -> Both:
        self._project(block)
        parts = self._forward.batched(text, TokenStream.TEXT), self._forward.batched(image, TokenStream.IMAGE)
        text, image = (part.flatten(0, 1) for part in self._network.pair(block, *parts))
        return text, image

    def _single(self, block: Any, joint: Tensor) -> Tensor:
        self._project(block)
        return self._network.single(block, self._forward.batched(joint, TokenStream.JOINT)).flatten(0, 1)

    def _project(self, block: Any) -> None:
        """Keys and values of the outside tokens whose hidden state enters a block that does not compute them."""
        forward, network = self._forward, self._network
        if not forward.tokens.hidden:
            return
        with forward.beyond() as hidden:
            attentions = zip(network.attentions(block), network.normed(block, hidden), strict=True)
            projected = [network.keys_values(attn, normed) for attn, normed in attentions]
            forward.keep([(network.hooks.rotated(key, TokenStream.IMAGE), value) for key, value in projected])
