"""The blocks of a driven transformer, one after the other, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from giornata.packed.first_block import FirstBlocks
from giornata.packed.low_rank_hooks import LowRankHooks
from giornata.packed.tracing import Lane, Tracing
from giornata_denoiser.families.driven.forward import Forward, Stream
from giornata_denoiser.families.driven.hooks import Hooks
from giornata_denoiser.families.driven.low_ranks import Streams

Both = tuple[Tensor, Tensor]
"""Text and image stream, (tokens, channels) each: the live tokens."""


class Driven(Protocol):
    """What blocks ask of their network: see :class:`giornata_denoiser.families.driven.network.DrivenNetwork`."""

    pairs: Sequence[Any]
    singles: Sequence[Any]
    hooks: Hooks
    low_ranks: LowRankHooks
    streams: Streams

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


class Blocks:
    """Those of one `forward`."""

    def __init__(self, network: Driven, forward: Forward, trace: Tracing) -> None:
        self._network, self._forward, self._trace = network, forward, trace

    def regions(self, text: Tensor, image: Tensor, first: FirstBlocks) -> Tensor:
        """The regions' tokens of the image stream behind the last block, of both streams before the first.

        Sequences that `first` has a cache of may leave behind the first block.
        """
        tokens = self._forward.tokens
        if not first:
            return tokens.leave(self.passed(text, image))
        with self._trace.span(Lane.COMPUTE, "block 0"):
            text, entered, image = self._first(text, image)
            staying = first.decide(tokens, entered, image)
        if not staying:
            tokens.left()
            return first.joined((), image[:0])
        forward = self._forward.some(staying)
        text, image = tokens.streams(staying, text, image)
        network = self._network
        with network.hooks.running(forward), network.low_ranks.acting(network.streams.where(forward)):
            rest = Blocks(network, forward, self._trace)
            image = forward.tokens.leave(rest.passed(text, forward.tokens.add(0, image), 1))
        tokens.left()
        return first.joined(forward.tokens.now.layout.image.lengths, image)

    def passed(self, text: Tensor, image: Tensor, first: int = 0) -> Tensor:
        """The image stream behind the last block, (live_tokens, channels), of both streams before the block `first`."""
        pairs, singles, tokens = self._network.pairs, self._network.singles, self._forward.tokens
        for index, block in enumerate(list(pairs)[first:], first):
            with self._trace.span(Lane.COMPUTE, f"block {index}"):
                text, image = self._pair(block, text, tokens.enter(index, image))
                image = tokens.add(index, image)
        if singles:
            joint = tokens.now.layout.join(text, image)
            begin = max(0, first - len(pairs))
            for index, block in enumerate(list(singles)[begin:], len(pairs) + begin):
                with self._trace.span(Lane.COMPUTE, f"block {index}"):
                    joint = self._single(block, tokens.enter_joint(index, joint))
                    joint = tokens.add_joint(index, joint)
            image = tokens.now.layout.split(joint)[1]
        return image

    def _first(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The text stream behind the first block, and the image stream before and behind it."""
        tokens = self._forward.tokens
        if self._network.pairs:
            entered = tokens.enter(0, image)
            text, image = self._pair(self._network.pairs[0], text, entered)
            return text, entered, image
        joint = tokens.enter_joint(0, tokens.now.layout.join(text, image))
        text, image = tokens.now.layout.split(self._single(self._network.singles[0], joint))
        return text, tokens.now.layout.split(joint)[1], image

    def _pair(self, block: Any, text: Tensor, image: Tensor) -> Both:
        self._project(block)
        parts = self._forward.batched(text, Stream.TEXT), self._forward.batched(image, Stream.IMAGE)
        text, image = (part.flatten(0, 1) for part in self._network.pair(block, *parts))
        return text, image

    def _single(self, block: Any, joint: Tensor) -> Tensor:
        self._project(block)
        return self._network.single(block, self._forward.batched(joint, Stream.JOINT)).flatten(0, 1)

    def _project(self, block: Any) -> None:
        """Keys and values of the outside tokens whose hidden state enters a block that does not compute them."""
        forward, network = self._forward, self._network
        if not forward.tokens.hidden:
            return
        with forward.beyond() as hidden:
            attentions = zip(network.attentions(block), network.normed(block, hidden), strict=True)
            projected = [network.keys_values(attn, normed) for attn, normed in attentions]
            forward.keep([(network.hooks.rotated(key, Stream.IMAGE), value) for key, value in projected])
