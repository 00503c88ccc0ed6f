"""Flux.1: its transformer over packed sequences, and the kinds of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.packed.flux import (
    FluxComponents,
    FluxForward,
    FluxProjections,
    Modulation,
    modulation_channels,
    prepare_modulation,
)
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import UNTRACED, BlockInputs, LaneTracer, PackedBatch, Rotary, make_layout
from giornata.tensors import EMBEDS, POOLED
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata.wire.models import BlockSpec
from giornata_denoiser.families.network import (
    TRAIN_TIMESTEPS,
    Grid,
    Network,
    PromptBuilder,
    ReferencePolicy,
    SequenceInputs,
    cell_positions,
    reference_tokens,
)
from giornata_denoiser.families.weights import load_flow
from giornata_denoiser.rows.row import Prompt


@dataclass(frozen=True, eq=False)
class FluxBatch:
    """The inputs of every step of a batch of Flux besides latents and times."""

    sequences: PackedBatch
    text: Tensor
    """(text_tokens, joint_dim)"""
    modulation: tuple[Tensor, ...]
    """What :func:`giornata.packed.flux.prepare_modulation` made of each sequence."""
    cells: tuple[int, ...]
    """Tokens of each sequence's picture."""
    answered: Tensor | None
    """(computed_tokens,) int64: the pictures' tokens among those behind the last block; None for all of them."""


class FluxInpaint(Network):
    """The network of the family `flux-inpaint`, as in `FluxInpaintPipeline`: it blends after each step."""

    kind = FluxTransformer2DModel
    load = classmethod(load_flow)

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        super().__init__(transformer)
        self.transformer: Any = transformer
        self.in_channels = int(transformer.config.in_channels)
        self.out_channels = int(transformer.out_channels)
        projections = FluxProjections(transformer)
        self._parts = FluxComponents(transformer, projections, self.attend, self.elementwise, self.low_ranks)
        # One per picture size and text length: 4.7 MB for 1024x1024 pixels.
        self._rotary = lru_cache(maxsize=64)(self._made_rotary)

    def control_base(self, token_pixels: int) -> ControlBase:
        """See :class:`giornata_denoiser.controls.residuals.ControlledNetwork`."""
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

    @property
    def text(self) -> PromptBuilder:
        """T5's embeddings, which pass all blocks, and CLIP's pooled embedding, which modulates them."""
        config = self.transformer.config
        joint, pooled = int(config.joint_attention_dim), int(config.pooled_projection_dim)
        return PromptBuilder({EMBEDS: (None, joint), POOLED: (pooled,)}, keeps_padding=True)

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

    @cached_property
    def prepared_bytes(self) -> int:
        """2.1 MB for Flux.1 in 16 bits."""
        return modulation_channels(self.transformer) * self.dtype.itemsize

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - of families that look at pictures
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
        *,
        low_rank: SequenceLoras | None = None,
    ) -> Tensor:
        """(steps, vectors * inner_dim): all adaLN vectors. Rounds to the dtype where diffusers does."""
        model = self.transformer
        scaled = [times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if model.config.guidance_embeds:
            guidance = torch.full_like(times, prompt.guidance_scale)
            scaled.append(guidance.to(self.dtype) * TRAIN_TIMESTEPS)
        pooled = prompt.tensors[POOLED].expand(len(times), -1)
        with self.low_ranks.alone(low_rank):
            return prepare_modulation(model, model.time_text_embed(*scaled, pooled))

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:  # noqa: ARG002 - of Fill
        """(tokens, in_channels): what enters the transformer for latents (tokens, channels), packed by sequence.

        Without companions, which are put behind each sequence's.
        """
        return latents

    def assemble(self, sequences: Sequence[SequenceInputs]) -> FluxBatch:
        """See :meth:`Network.assemble`."""
        prompts = [sequence.prompt for sequence in sequences]
        own = [reference_tokens([sequence.grid]) for sequence in sequences]
        image = [cells + sequence.companions for cells, sequence in zip(own, sequences, strict=True)]
        lengths = [prompt.joint_tokens for prompt in prompts]
        cosine, sine = zip(
            *(
                self._rotary(text, (sequence.grid, *sequence.beside))
                for text, sequence in zip(lengths, sequences, strict=True)
            ),
            strict=True,
        )
        return FluxBatch(
            PackedBatch(
                make_layout(lengths, image, self.device),
                (torch.cat(cosine), torch.cat(sine)),
                tuple(sequence.region for sequence in sequences),
                tuple(prompt.padding_tokens for prompt in prompts),
            ),
            torch.cat([prompt.embeds for prompt in prompts]),
            tuple(sequence.prepared for sequence in sequences),
            tuple(own),
            self._answered(sequences, own) if any(sequence.companions for sequence in sequences) else None,
        )

    def predict(
        self,
        batch: FluxBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`Network.predict`; the output is a velocity."""
        image = self.model_input(latents, conditioning)
        if batch.answered is not None:
            image = self._accompanied(image, batch.cells, conditioning)
        modulation = Modulation(self.transformer, batch.modulation, steps)
        forward = FluxForward(
            self._parts, batch.sequences, modulation, uses, trace=trace, ulysses=self.ulysses
        )
        return forward.run(batch.text, image, batch.answered)

    def _answered(self, sequences: Sequence[SequenceInputs], own: Sequence[int]) -> Tensor:
        """See :attr:`FluxBatch.answered`: a region has no companions, and in all of a sequence they lie last."""
        parts, end = [], 0
        for sequence, cells in zip(sequences, own, strict=True):
            whole = sequence.region is None
            computed = cells if sequence.region is None else len(sequence.region.computed)
            parts.append(torch.arange(end, end + computed, device=self.device))
            end += computed + (sequence.companions if whole else 0)
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
        places = [cell_positions(grid, self.device, before=min(nth, 1)) for nth, grid in enumerate(pictures)]
        text = torch.zeros(text_tokens, 3, device=self.device)
        rotary: Rotary = self.transformer.pos_embed(torch.cat((text, *places)))
        return rotary


class FluxKontext(FluxInpaint):
    """The network of the family `flux-kontext`, as in `FluxKontextInpaintPipeline`: a clean picture stands beside."""

    references = ReferencePolicy(replaced=True)


class FluxFill(FluxInpaint):
    """The network of the family `flux-fill`, as in `FluxFillPipeline`: masked picture and mask are input channels."""

    blends = False

    @property
    def conditioning(self) -> Mapping[str, int]:
        """The mask is pixel-unshuffled: 16x16 pixels per token for an autoencoder of factor 8."""
        pictures = dict.fromkeys(("noise", "image_latents", "masked_image_latents"), self.out_channels)
        return {**pictures, "mask": self.in_channels - 2 * self.out_channels}

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Latents, masked picture's latents, mask: written once, from each sequence's own tensors."""
        image = latents.new_empty(len(latents), self.in_channels)
        width = self.out_channels
        image[:, :width] = latents
        torch.cat([row["masked_image_latents"] for row in conditioning], out=image[:, width : 2 * width])
        torch.cat([row["mask"] for row in conditioning], out=image[:, 2 * width :])
        return image
