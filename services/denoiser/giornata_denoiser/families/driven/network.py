"""A transformer of diffusers over packed sequences, driven block by block: what all driven families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Final, Self, cast

import torch
from torch import Tensor, nn

from giornata.packed import attention, elementwise
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.low_rank_hooks import LowRankHooks
from giornata.packed.region import Rotary
from giornata.packed.tracing import UNTRACED, LaneTracer
from giornata.packed.ulysses import AllToAllGroup, Ulysses
from giornata.packed.uses import BlockInputs
from giornata.planning.specs import grouped
from giornata.wire.blocks import BlockSpec
from giornata_denoiser.families import guidance, patches
from giornata_denoiser.families.driven.attention import by_head
from giornata_denoiser.families.driven.batch import DrivenBatch, PreparedSequence, assembled, share
from giornata_denoiser.families.driven.blocks import BlockRunner
from giornata_denoiser.families.driven.forward import CleanTokens, ForwardContext, Prefilled, TokenStream
from giornata_denoiser.families.driven.hooks import TransformerHooks
from giornata_denoiser.families.driven.low_ranks import LayerStreams
from giornata_denoiser.families.driven.prefix import Prefix, PrefixKeysValues, empty_text
from giornata_denoiser.families.driven.prompts import EMBEDS, DrivenPrompt, DrivenPromptBuilder
from giornata_denoiser.families.protocol import SequenceInputs
from giornata_denoiser.families.references import NONE, Grid, ReferencePolicy, area
from giornata_denoiser.rows.row import Prompt

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
        gather = elementwise.choose(self.device, self.dtype).gather
        self._attend = attention.choose(self.device, self.dtype, gather)
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
        """What one block is."""

    @abstractmethod
    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """What each of a block's attentions projects of its image stream, (items, tokens of each, channels)."""

    @abstractmethod
    def vectors(self, prompt: DrivenPrompt, times: Tensor) -> Tensor:
        """(steps, hooks.width): the modulation of all steps; `times` are (steps,) float32."""

    @abstractmethod
    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """Rotary embedding of a sequence: text, picture, companions; 0 wide where positions turn nothing.

        `beside` are the clean pictures, see :meth:`giornata_denoiser.families.references.ReferencePolicy.grids`. Text
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
        return area(self.references.grids(grid, given, generated=generated))

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
        """Channels of a token: its :data:`~giornata_denoiser.families.patches.PATCH`² latent pixels."""
        return int(self.transformer.proj_out.out_features)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """See :attr:`giornata_denoiser.families.protocol.Network.blocks`."""
        return grouped(self.spec(block) for block in (*self.pairs, *self.singles))

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
        batch = assembled(sequences, self, self.device)
        return batch if self._ulysses is None else share(batch, self._ulysses)

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
        return guidance.guided(positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`."""
        return patches.unpacked(latent, grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`."""
        return patches.packed(pixels)

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
