"""The transformer of Flux checkpoints, `FluxTransformer2DModel`, over packed sequences, and the text that it takes.

A prompt is embeddings, which pass all blocks, and a pooled vector, which modulates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Self, cast

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from giornata.control.protocol import ControlText
from giornata.packed import attention, elementwise
from giornata.packed.flux.blocks import FluxComponents
from giornata.packed.flux.forward import FluxForward
from giornata.packed.flux.modulation import Modulation, prepared, prepared_channels
from giornata.packed.flux.projections import FluxProjections
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.low_rank_hooks import LowRankHooks
from giornata.packed.moving import moved
from giornata.packed.packing import layout
from giornata.packed.region import PackedBatch, Rotary
from giornata.packed.tracing import UNTRACED, LaneTracer
from giornata.packed.ulysses import AllToAllGroup, Ulysses
from giornata.packed.uses import BlockInputs
from giornata.tensors import PROMPT_MASK, padding_tokens
from giornata.wire.adapters import ControlKind
from giornata.wire.blocks import BlockSpec
from giornata.wire.controlnets import ControlBase
from giornata_denoiser.families import guidance, patches
from giornata_denoiser.families.positions import cells
from giornata_denoiser.families.protocol import SequenceInputs
from giornata_denoiser.families.references import NONE, Grid, ReferencePolicy, area
from giornata_denoiser.rows.row import Prompt

TRAIN_TIMESTEPS: Final = 1000
"""Timestep = sigma * this; the transformers are trained with it."""


@dataclass(frozen=True, eq=False)
class FluxPrompt:
    """One sequence's prompt; satisfies :class:`giornata_denoiser.rows.row.Prompt`."""

    embeds: Tensor
    """(text_tokens, joint_dim)"""
    pooled: Tensor
    """(pooled_dim,)"""
    guidance_scale: float
    """Distilled guidance; read only where the transformer embeds it."""
    padding_tokens: int = 0
    """How many of its tokens, the last ones, are padding."""

    @property
    def joint_tokens(self) -> int:
        """All of its tokens."""
        return len(self.embeds)

    @property
    def size_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.embeds.nbytes + self.pooled.nbytes

    def to(self, device: torch.device) -> FluxPrompt:
        """The same prompt on `device`; itself where it is there."""
        if self.embeds.device == device:
            return self
        return replace(self, embeds=moved(self.embeds, device), pooled=moved(self.pooled, device))


@dataclass(frozen=True)
class FluxPromptBuilder:
    """What a prompt becomes; satisfies :class:`giornata_denoiser.families.protocol.PromptBuilder`."""

    tensors: Mapping[str, tuple[int | None, ...]]

    def prompt(
        self,
        tensors: Mapping[str, Tensor],
        grid: Grid,  # noqa: ARG002 - protocol
        guidance_scale: float,
    ) -> FluxPrompt:
        """Both tensors as they are."""
        return FluxPrompt(
            tensors["prompt_embeds"],
            tensors["pooled_prompt_embeds"],
            guidance_scale,
            padding_tokens(tensors.get(PROMPT_MASK)),
        )


@dataclass(frozen=True, eq=False)
class FluxBatch:
    """What the transformer sees of every step of a batch besides latents and times."""

    sequences: PackedBatch
    text: Tensor
    """(text_tokens, joint_dim)"""
    modulation: tuple[Tensor, ...]
    """What :func:`giornata.packed.flux.modulation.prepared` made of each sequence."""
    cells: tuple[int, ...]
    """Tokens of each sequence's picture."""
    answered: Tensor | None
    """(computed_tokens,) int64: the pictures' tokens among those behind the last block; None for all of them."""


class PackedFlux(ABC):
    """The transformer of Flux checkpoints over packed sequences.

    With :meth:`model_input`, `conditioning`, `unmasked` and `blends` of a subclass it satisfies
    :class:`giornata_denoiser.families.protocol.Network`.
    """

    references: ReferencePolicy = NONE

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer: Any = transformer
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self.in_channels = int(transformer.config.in_channels)
        self.out_channels = int(transformer.out_channels)
        each = elementwise.choose(self.device, self.dtype)
        attend = attention.choose(self.device, self.dtype, each.gather)
        self._low_ranks = LowRankHooks(transformer)
        self._parts = FluxComponents(transformer, FluxProjections(transformer), attend, each, self._low_ranks)
        # One per picture size and text length: 4.7 MB for 1024x1024 pixels.
        self._rotary = lru_cache(maxsize=64)(self._made_rotary)

    def shared(self, exchange: AllToAllGroup) -> Self:
        """See :class:`giornata_denoiser.families.protocol.ShardableNetwork`."""
        member = copy(self)
        member._parts = self._parts._replace(ulysses=Ulysses(exchange))  # noqa: SLF001 - its own class
        return member

    def sites(self, block: int) -> int:  # noqa: ARG002 - protocol
        """See :class:`giornata_denoiser.families.protocol.ShardableNetwork`."""
        return 1

    def control_base(self, token_pixels: int) -> ControlBase:
        """See :class:`giornata_denoiser.controls.networks.ControlledNetwork`."""
        model, singles = self.transformer, len(self.transformer.single_transformer_blocks)
        return ControlBase(
            kind=ControlKind.FLUX,
            channels=(int(model.inner_dim),) * (len(model.transformer_blocks) + singles),
            singles=singles,
            latent_channels=self.out_channels,
            token_pixels=token_pixels,
            text_channels=int(model.config.joint_attention_dim),
            pooled_channels=int(model.config.pooled_projection_dim),
        )

    @staticmethod
    def control_text(prompt: Prompt) -> ControlText:
        """See :class:`giornata_denoiser.controls.networks.ControlledNetwork`."""
        of = cast("FluxPrompt", prompt)
        return ControlText(of.embeds, of.pooled, guidance_scale=of.guidance_scale)

    @property
    def text(self) -> FluxPromptBuilder:
        """The text that the transformer takes: T5's embeddings and CLIP's pooled embedding."""
        config = self.transformer.config
        joint, pooled = int(config.joint_attention_dim), int(config.pooled_projection_dim)
        return FluxPromptBuilder({"prompt_embeds": (None, joint), "pooled_prompt_embeds": (pooled,)})

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Double blocks and single blocks are alike to a planner.

        A token passes 12 d² weights: attention's four projections and a feed-forward four times as wide, one after the
        other or side by side. A projected token passes two of these projections. A pair takes d for its score and d
        for its value.
        """
        model, width = self.transformer, int(self.transformer.inner_dim)
        return (
            BlockSpec(
                heads=int(model.config.num_attention_heads),
                parts=dict.fromkeys(("key", "value", "hidden"), width),
                linear=12.0 * width**2,
                text=12.0 * width**2,
                outside=2.0 * width**2,
                pair=2.0 * width,
                text_pair=2.0 * width,
                count=len(model.transformer_blocks) + len(model.single_transformer_blocks),
            ),
        )

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """See :attr:`giornata_denoiser.families.protocol.Network.layers`."""
        return self._low_ranks.layers

    @cached_property
    def prepared_bytes(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Network.prepared_bytes`; 2.1 MB for Flux.1 in 16 bits."""
        return prepared_channels(self.transformer) * self.dtype.itemsize

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - protocol
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
        *,
        low_rank: SequenceLoras | None = None,
    ) -> Tensor:
        """(steps, vectors * inner_dim): all adaLN vectors. Rounds to the dtype where diffusers does."""
        model, of = self.transformer, cast("FluxPrompt", prompt)
        scaled = [times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if model.config.guidance_embeds:
            guidance = torch.full_like(times, of.guidance_scale)
            scaled.append(guidance.to(self.dtype) * TRAIN_TIMESTEPS)
        with self._low_ranks.alone(low_rank):
            return prepared(model, model.time_text_embed(*scaled, of.pooled.expand(len(times), -1)))

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:
        """The clean pictures' tokens."""
        return area(self.references.grids(grid, given, generated=generated))

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - protocol
        """None."""
        return 0

    @abstractmethod
    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(tokens, in_channels): what enters the transformer for latents (tokens, channels), packed by sequence.

        Without companions, which are put behind each sequence's.
        """

    def assemble(self, sequences: Sequence[SequenceInputs]) -> FluxBatch:
        """See :meth:`giornata_denoiser.families.protocol.Network.assemble`."""
        prompts = [cast("FluxPrompt", sequence.prompt) for sequence in sequences]
        lengths = [prompt.joint_tokens for prompt in prompts]
        own = [area([sequence.grid]) for sequence in sequences]
        companions = [sequence.companions for sequence in sequences]
        rotary = [
            self._rotary(text, (sequence.grid, *sequence.beside))
            for text, sequence in zip(lengths, sequences, strict=True)
        ]
        image = [sum(both) for both in zip(own, companions, strict=True)]
        return FluxBatch(
            PackedBatch(
                layout(lengths, image, self.device),
                (torch.cat([cosine for cosine, _ in rotary]), torch.cat([sine for _, sine in rotary])),
                tuple(sequence.region for sequence in sequences),
                tuple(prompt.padding_tokens for prompt in prompts),
            ),
            torch.cat([prompt.embeds for prompt in prompts]),
            tuple(cast("Tensor", sequence.prepared) for sequence in sequences),
            tuple(own),
            self._answered(sequences) if any(companions) else None,
        )

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
        if not isinstance(batch, FluxBatch):
            raise TypeError(f"expected a batch of Flux, received {type(batch).__name__}")
        image = self.model_input(latents, conditioning)
        if batch.answered is not None:
            image = self._accompanied(image, batch.cells, conditioning)
        modulation = Modulation(self.transformer, batch.modulation, steps)
        forward = FluxForward(self._parts, batch.sequences, modulation, uses, trace=trace)
        return forward.run(batch.text, image, batch.answered)

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance: negative + scale * (positive - negative)."""
        return guidance.guided(positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`."""
        return patches.unpacked(latent, grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`."""
        return patches.packed(pixels)

    def _answered(self, sequences: Sequence[SequenceInputs]) -> Tensor:
        """See :attr:`FluxBatch.answered`: a region has no companions, and in all of a sequence they lie last."""
        parts, end = [], 0
        for sequence in sequences:
            computed = area([sequence.grid]) if sequence.region is None else len(sequence.region.computed)
            parts.append(torch.arange(end, end + computed, device=self.device))
            end += computed + (sequence.companions if sequence.region is None else 0)
        return torch.cat(parts)

    def _accompanied(
        self, image: Tensor, lengths: Sequence[int], conditioning: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """`image` with each sequence's clean pictures behind its own tokens."""
        parts = []
        for own, row in zip(torch.split(image, list(lengths)), conditioning, strict=True):
            beside = self.references.tokens(row)
            parts += [own] if beside is None else [own, beside]
        return torch.cat(parts)

    def _made_rotary(self, text_tokens: int, pictures: tuple[Grid, ...]) -> Rotary:
        """Rotary embedding, text then pictures: text is at (0, 0, 0), the token of line y and column x at (n, y, x).

        n is 0 for the picture that is denoised, and 1 for clean ones.
        """
        places = [
            functional.pad(cells(grid, self.device), (1, 0), value=min(nth, 1))
            for nth, grid in enumerate(pictures)
        ]
        text = torch.zeros(text_tokens, 3, device=self.device)
        rotary: Rotary = self.transformer.pos_embed(torch.cat((text, *places)))
        return rotary
