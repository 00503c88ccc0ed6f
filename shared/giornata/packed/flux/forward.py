"""One forward of `FluxTransformer2DModel` over packed sequences; some take part of it from a template.

Its linear layers are called as they are, or several as one product; what happens between them is that of
:mod:`giornata.packed.elementwise`, and the attention is over each sequence's own keys. Without templates it equals the
module's own `forward` of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from giornata.packed.flux.blocks import FluxBlocks, FluxComponents
from giornata.packed.flux.modulation import Modulation
from giornata.packed.region import PackedBatch
from giornata.packed.tracing import LaneTracer, TraceLane
from giornata.packed.uses import BlockInputs


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
                image = tokens.add(index, image)
        joint = tokens.now.layout.join(text, image)
        for index, block in enumerate(model.single_transformer_blocks, doubles):
            with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                joint = over.single(index, block, tokens.enter_joint(index, joint))
                joint = tokens.add_joint(index, joint)
        return tokens.leave(joint.index_select(0, tokens.now.layout.image_positions))

    def samples(self, text: Tensor, image: Tensor, hint: Tensor) -> Iterator[Tensor]:
        """What a `FluxControlNetModel` adds behind each block in turn, (live_tokens, inner_dim), unscaled.

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
