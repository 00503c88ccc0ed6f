"""A transformer of diffusers over packed sequences, driven block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Final, Protocol, Self, cast

import torch
from torch import Tensor, nn

from giornata.packed import attention, elementwise
from giornata.packed.block_inputs import BlockInputs
from giornata.packed.compute_set import Rotary
from giornata.packed.low_rank import LowRankHooks, SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer, TraceLane
from giornata.packed.sharding import AllToAllGroup, Ulysses
from giornata.planning.operations import group_blocks
from giornata.wire.models import BlockSpec
from giornata_denoiser.families import protocol, tokens
from giornata_denoiser.families.driven.batch import (
    DrivenBatch,
    Prefix,
    PrefixKeysValues,
    PreparedSequence,
    assemble_batch,
    empty_text,
    share_batch,
)
from giornata_denoiser.families.driven.forward import (
    CleanTokens,
    ForwardContext,
    LayerStreams,
    Prefilled,
    TokenStream,
    TransformerHooks,
    by_head,
)
from giornata_denoiser.families.driven.prompts import EMBEDS, DrivenPrompt, DrivenPromptBuilder
from giornata_denoiser.families.protocol import NONE, Grid, ReferencePolicy, SequenceInputs, reference_tokens
from giornata_denoiser.rows.row import Prompt

# The blocks of a driven transformer as values: multiplications are counted at their layers' weights.


def multiplications(*modules: nn.Module) -> float:
    """Multiplications of one token that passes all linear layers of these modules."""
    layers = (layer for module in modules for layer in module.modules())
    return float(sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)))


def spec(attn: Any, *, image: float, text: float | None = None, keys: float, sites: int = 1) -> BlockSpec:
    """A block; an image token takes `image` multiplications in all, its keys and values `keys` of them.

    A text token takes `text`, by default as many as an image token; 0 where text is not attended to. A block with more
    `sites` than one attention keeps their heads side by side, and text is part of the first alone.
    """
    hidden = int(getattr(attn, "out_dim", attn.inner_dim))  # Qwen-Image 2.1's is as wide as its heads
    inner, of_text = int(attn.inner_dim), image if text is None else text
    return BlockSpec(
        heads=sites * int(attn.heads),
        parts={"key": sites * inner, "value": sites * inner, "hidden": hidden},
        linear=image,
        text=of_text,
        outside=keys,
        pair=2.0 * inner * sites,
        text_pair=2.0 * inner if of_text else 0.0,
    )


# The blocks of a driven transformer, one after the other, in one forward.


Both = tuple[Tensor, Tensor]
"""Text and image stream, (tokens, channels) each: the live tokens."""


class BlockwiseNetwork(Protocol):
    """The operations that blocks ask of their network, such as a :class:`DrivenNetwork`."""

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
        """Return what each of a block's attentions projects of its image stream."""

    def keys_values(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return what an attention projects, unturned."""


class BlockRunner:
    """A runner of the blocks of one `forward`."""

    def __init__(self, network: BlockwiseNetwork, forward: ForwardContext, trace: LaneTracer) -> None:
        self._network, self._forward, self._trace = network, forward, trace

    def passed(self, text: Tensor, image: Tensor) -> Tensor:
        """The image stream behind the last block, (live_tokens, channels), of both streams before the first."""
        pairs, singles, tokens = self._network.pairs, self._network.singles, self._forward.tokens
        for index, block in enumerate(pairs):
            with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                text, image = self._pair(block, text, tokens.enter(index, image))
                if tokens.residuals:
                    image = tokens.add(index, image)
        if singles:
            joint = tokens.now.layout.join(text, image)
            for index, block in enumerate(singles, len(pairs)):
                with self._trace.span(TraceLane.COMPUTE, f"block {index}"):
                    joint = self._single(block, tokens.enter_joint(index, joint))
                    if tokens.residuals:
                        joint = tokens.add_joint(index, joint)
            image = tokens.now.layout.split(joint)[1]
        return image

    def _pair(self, block: Any, text: Tensor, image: Tensor) -> Both:
        forward = self._forward
        if forward.tokens.hidden:
            self._project(block)
        text, image = forward.batched(text, TokenStream.TEXT), forward.batched(image, TokenStream.IMAGE)
        text, image = self._network.pair(block, text, image)
        return text.flatten(0, 1), image.flatten(0, 1)

    def _single(self, block: Any, joint: Tensor) -> Tensor:
        if self._forward.tokens.hidden:
            self._project(block)
        return self._network.single(block, self._forward.batched(joint, TokenStream.JOINT)).flatten(0, 1)

    def _project(self, block: Any) -> None:
        """Keys and values of the outside tokens whose hidden state enters a block that does not compute them."""
        forward, network = self._forward, self._network
        with forward.beyond() as hidden:
            attentions = zip(network.attentions(block), network.normed(block, hidden), strict=True)
            projected = [network.keys_values(attn, normed) for attn, normed in attentions]
            forward.keep([(network.hooks.rotated(key, TokenStream.IMAGE), value) for key, value in projected])


# A transformer of diffusers over packed sequences, driven block by block: what all driven families share.


TRAIN_TIMESTEPS: Final = 1000
"""Timestep = sigma * this."""


class DrivenNetwork(ABC):
    """A transformer whose blocks run unmodified; satisfies :class:`giornata_denoiser.families.protocol.Network`.

    Blocks of `pairs` have a text and an image stream; those behind them, `singles`, one joint stream. A subclass sets
    the hooks, and says what happens before and behind the blocks; what most transformers of diffusers do is said here.
    """

    blends: bool = True
    references: ReferencePolicy = NONE
    clean_at_zero: bool = False
    """Whether companions are modulated as at timestep 0, whatever the step."""
    pairs: Sequence[Any]
    singles: Sequence[Any] = ()

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self.hooks = TransformerHooks()
        self.low_ranks = LowRankHooks(transformer)  # before others stand in place of layers
        gather = elementwise.choose_elementwise(self.device, self.dtype).gather
        self._attend = attention.choose_attention(self.device, self.dtype, gather)
        self._ulysses: Ulysses | None = None
        self._rotary = lru_cache(maxsize=64)(self.rotated)
        self.hook()
        self.streams = LayerStreams(self.low_ranks, self.pairs, self.singles)

    # What a family says

    @abstractmethod
    def hook(self) -> None:
        """Name the blocks and set their hooks."""

    @abstractmethod
    def spec(self, block: Any) -> BlockSpec:
        """Return what one block is."""

    @abstractmethod
    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """Return what each of a block's attentions projects of its image stream, (items, tokens of each, channels)."""

    @abstractmethod
    def vectors(self, prompt: DrivenPrompt, times: Tensor) -> Tensor:
        """(steps, hooks.width): the modulation of all steps; `times` are (steps,) float32."""

    @abstractmethod
    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """Rotary embedding of a sequence: text, picture, companions; 0 wide where positions turn nothing.

        `beside` are the clean pictures, see :meth:`giornata_denoiser.families.protocol.ReferencePolicy.grids`. Text
        that is a prefix is among it, clean pictures that are one are not.
        """

    @abstractmethod
    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """One block of two streams, (items, tokens of each, channels) each: see :meth:`ForwardContext.batched`."""

    def attentions(self, block: Any) -> Sequence[Any]:
        """A block's attentions, in order."""
        return (block.attn,)

    def keys_values(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """What an attention projects of (items, tokens of each, channels): (tokens, heads, head_dim), unturned."""
        return by_head(attn, attn.to_k(normed), attn.norm_k), by_head(attn, attn.to_v(normed))

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """One block of the joint stream, (items, tokens of each, channels)."""
        raise NotImplementedError

    def text_stream(self, prompt: DrivenPrompt) -> Tensor:
        """(joint_tokens, channels): what enters the first block of a prompt."""
        text: Tensor = self.transformer.context_embedder(prompt.embeds)
        return text

    def image_stream(self, latents: Tensor) -> Tensor:
        """(n, channels): what enters the first block of (n, out_channels), positions not added."""
        image: Tensor = self.transformer.x_embedder(latents)
        return image

    def positions(self, grid: Grid) -> Tensor | None:  # noqa: ARG002 - of a family that adds some
        """(cells, channels): what is added to a picture's tokens before the first block; None for nothing."""
        return None

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:
        """Tokens behind a picture's that attend and are attended to, and are never answered for."""
        return reference_tokens(self.references.grids(grid, given, generated=generated))

    def companion_stream(self, count: int, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - of a family that pads
        """(count, channels): a picture's companions where they enter the first block."""
        return self.image_stream(cast("Tensor", self.references.tokens(conditioning)))

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - of some
        """See :meth:`giornata_denoiser.families.protocol.Network.prefix_tokens`."""
        return cast("DrivenPrompt", prompt).prefix_tokens

    def prefix(
        self, prompt: DrivenPrompt, conditioning: Mapping[str, Tensor], beside: Sequence[Grid]
    ) -> Prefix:
        """So many tokens of a sequence, where they enter the first block."""
        raise NotImplementedError

    def answer(self, image: Tensor) -> Tensor:
        """The output of (items, tokens of each, channels): (tokens, out_channels), packed as latents are."""
        model = self.transformer
        velocity: Tensor = model.proj_out(model.norm_out(image, image[:1, 0])).flatten(0, 1)
        return velocity

    # What all families share

    @property
    def text(self) -> DrivenPromptBuilder:
        """The embeddings of the prompt's own tokens."""
        return DrivenPromptBuilder({EMBEDS: (None, int(self.transformer.config.joint_attention_dim))})

    @property
    def out_channels(self) -> int:
        """Channels of a token: its :data:`~giornata_denoiser.families.tokens.PATCH`² latent pixels."""
        return int(self.transformer.proj_out.out_features)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """See :attr:`giornata_denoiser.families.protocol.Network.blocks`."""
        return group_blocks(self.spec(block) for block in (*self.pairs, *self.singles))

    @property
    def conditioning(self) -> Mapping[str, int]:
        """All packed as the latent is; the mask is one value per latent pixel, repeated."""
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels)

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is repainted."""
        return {**conditioning, "mask": torch.zeros_like(conditioning["mask"])}

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """See :attr:`giornata_denoiser.families.protocol.Network.layers`."""
        return self.low_ranks.layers

    @property
    def prepared_bytes(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Network.prepared_bytes`."""
        return self.hooks.width * self.dtype.itemsize

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
        *,
        low_rank: SequenceLoras | None = None,
    ) -> PreparedSequence:
        """Modulation of all steps, the text stream and the prefix: none of them depends on the latent."""
        of = cast("DrivenPrompt", prompt)
        prefilled: Prefilled = ()
        with self.low_ranks.alone(low_rank):
            if self.prefix_tokens(of, beside):
                prefilled = self._prefilled(of, self.prefix(of, conditioning, beside))
            clean = self.vectors(of, torch.zeros_like(times[:1])) if self.clean_at_zero else None
            return PreparedSequence(self.vectors(of, times), self.text_stream(of), prefilled, clean)

    def rotary(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """:meth:`rotated`, kept for pictures of one size and texts of one length."""
        return self._rotary(text_tokens, grid, beside)

    def assemble(self, sequences: Sequence[SequenceInputs]) -> DrivenBatch:
        """See :meth:`giornata_denoiser.families.protocol.Network.assemble`."""
        batch = assemble_batch(sequences, self, self.device)
        return batch if self._ulysses is None else share_batch(batch, self._ulysses)

    def shared(self, exchange: AllToAllGroup) -> Self:
        """See :class:`giornata_denoiser.families.protocol.ShardableNetwork`."""
        member = copy(self)
        member._ulysses = Ulysses(exchange)  # noqa: SLF001 - its own class
        return member

    def sites(self, block: int) -> int:
        """See :class:`giornata_denoiser.families.protocol.ShardableNetwork`."""
        return len(self.attentions((*self.pairs, *self.singles)[block]))

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.predict`; the output is a velocity."""
        if not isinstance(batch, DrivenBatch):
            raise TypeError(f"expected a batch of {type(self).__name__}, received {type(batch).__name__}")
        made = [each.vectors[step : step + 1] for each, step in zip(batch.prepared, steps, strict=True)]
        prefixes = [each.prefix for each in batch.prepared]
        at_zero = [each.clean for each in batch.prepared if each.clean is not None]
        clean = CleanTokens(torch.cat(at_zero), batch.companions) if at_zero else None
        shared = batch.shared
        forward = ForwardContext(
            batch.sequences, torch.cat(made), uses, self._attend, batch.output, prefixes, shared, clean
        )
        with self.hooks.running(forward), self.low_ranks.acting(self.streams.where(forward)):
            image = self._entering(forward, batch, latents, conditioning)
            image = forward.tokens.leave(BlockRunner(self, forward, trace).passed(batch.text, image))
            _, places = batch.rows(forward.tokens.now)
            image = image if len(places) == len(image) else image.index_select(0, places)
            output = self.answer(forward.batched(image, TokenStream.OUTPUT))
        if shared is None or batch.answered is None:
            return output
        return shared.gathered(batch.answered, output)

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance: negative + scale * (positive - negative)."""
        return protocol.guide(positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`."""
        return tokens.unpack_patches(latent, grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`."""
        return tokens.pack_patches(pixels)

    def _entering(
        self,
        forward: ForwardContext,
        batch: DrivenBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
    ) -> Tensor:
        """(live_tokens, channels): the image stream before the first block."""
        live = forward.tokens.now
        rows, places = batch.rows(live)
        some = len(rows) < len(latents)
        entering = self.streams.entering(forward, batch.companions)
        with self.low_ranks.acting(entering):
            picture = self.image_stream(latents.index_select(0, rows) if some else latents)
        if batch.positions is not None:
            picture = picture + (batch.positions.index_select(0, rows) if some else batch.positions)
        if len(rows) == len(live.image):
            return picture
        image = picture.new_empty(len(live.image), picture.shape[1])
        image[places] = picture
        for sequence, count in enumerate(batch.companions):
            if count and live.whole[sequence]:
                _, end = live.layout.image.bounds[sequence]
                with self.low_ranks.alone(forward.owners.of(sequence)):
                    image[end - count : end] = self._companions(batch, sequence, conditioning[sequence])
        return image

    def _companions(self, batch: DrivenBatch, sequence: int, conditioning: Mapping[str, Tensor]) -> Tensor:
        """(companions, channels): those of a sequence that this process computes."""
        if not batch.of_companions:
            return self.companion_stream(batch.companions[sequence], conditioning)
        chosen = batch.of_companions[sequence]
        return self.companion_stream(batch.all_companions[sequence], conditioning).index_select(0, chosen)

    def _prefilled(self, prompt: DrivenPrompt, prefix: Prefix) -> Prefilled:
        """Keys and values of a sequence's prefix, by block."""
        kept = PrefixKeysValues()
        vectors = self.vectors(prompt, torch.zeros(1, device=self.device))
        with self.hooks.running(prefix.forward(vectors, kept)) as forward:
            BlockRunner(self, forward, UNTRACED).passed(empty_text(prefix.stream), prefix.stream)
        return kept.prefilled
