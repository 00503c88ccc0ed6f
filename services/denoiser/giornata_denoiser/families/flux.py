"""Flux.1: its transformer over packed sequences, and the kinds of its checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, Self, cast

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from giornata.control.networks import ControlText
from giornata.packed import attention, elementwise
from giornata.packed.block_inputs import BlockInputs
from giornata.packed.compute_set import PackedBatch, Rotary
from giornata.packed.flux import (
    FluxComponents,
    FluxForward,
    FluxProjections,
    Modulation,
    modulation_channels,
    prepare_modulation,
)
from giornata.packed.low_rank import LowRankHooks, SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer, make_layout, to_device
from giornata.packed.sharding import AllToAllGroup, Ulysses
from giornata.tensors import PROMPT_MASK, padding_tokens
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata.wire.models import BlockSpec
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families import protocol, tokens, weights
from giornata_denoiser.families.protocol import (
    NONE,
    Grid,
    ModelFamily,
    ReferencePolicy,
    SequenceInputs,
    reference_tokens,
)
from giornata_denoiser.families.sampling.schedules import FlowMatching, flow_scheduler_config, shifted_by_size
from giornata_denoiser.families.tokens import cell_positions
from giornata_denoiser.rows.row import Prompt

# The transformer of Flux checkpoints, `FluxTransformer2DModel`, over packed sequences, and the text that it
# takes.
#
# A prompt is embeddings, which pass all blocks, and a pooled vector, which modulates them.


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
        return replace(self, embeds=to_device(self.embeds, device), pooled=to_device(self.pooled, device))


@dataclass(frozen=True)
class FluxPromptBuilder:
    """A builder of Flux's prompt tensors; satisfies :class:`giornata_denoiser.families.protocol.PromptBuilder`."""

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
        each = elementwise.choose_elementwise(self.device, self.dtype)
        attend = attention.choose_attention(self.device, self.dtype, each.gather)
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
        """See :class:`giornata_denoiser.controls.local.ControlledNetwork`."""
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
        """See :class:`giornata_denoiser.controls.local.ControlledNetwork`."""
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
        return modulation_channels(self.transformer) * self.dtype.itemsize

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
            return prepare_modulation(model, model.time_text_embed(*scaled, of.pooled.expand(len(times), -1)))

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:
        """The clean pictures' tokens."""
        return reference_tokens(self.references.grids(grid, given, generated=generated))

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
        own = [reference_tokens([sequence.grid]) for sequence in sequences]
        companions = [sequence.companions for sequence in sequences]
        rotary = [
            self._rotary(text, (sequence.grid, *sequence.beside))
            for text, sequence in zip(lengths, sequences, strict=True)
        ]
        image = [sum(both) for both in zip(own, companions, strict=True)]
        return FluxBatch(
            PackedBatch(
                make_layout(lengths, image, self.device),
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
        return protocol.guide(positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`."""
        return tokens.unpack_patches(latent, grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`."""
        return tokens.pack_patches(pixels)

    def _answered(self, sequences: Sequence[SequenceInputs]) -> Tensor:
        """See :attr:`FluxBatch.answered`: a region has no companions, and in all of a sequence they lie last."""
        parts, end = [], 0
        for sequence in sequences:
            computed = (
                reference_tokens([sequence.grid])
                if sequence.region is None
                else len(sequence.region.computed)
            )
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
            functional.pad(cell_positions(grid, self.device), (1, 0), value=min(nth, 1))
            for nth, grid in enumerate(pictures)
        ]
        text = torch.zeros(text_tokens, 3, device=self.device)
        rotary: Rotary = self.transformer.pos_embed(torch.cat((text, *places)))
        return rotary


# Kinds of Flux checkpoints: text-to-image models, which inpaint, Kontext, and Fill; safetensors only.


class FluxInpaint(PackedFlux):
    """The network of the family `flux-inpaint`, as in `FluxInpaintPipeline`: it blends after each step."""

    blends: Final = True

    @property
    def conditioning(self) -> Mapping[str, int]:
        """All packed as the latent is; the mask is one value per latent pixel, repeated."""
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels)

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:  # noqa: ARG002 - protocol
        """The latents alone."""
        return latents

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is repainted."""
        return {**conditioning, "mask": torch.zeros_like(conditioning["mask"])}


class FluxKontext(FluxInpaint):
    """The network of the family `flux-kontext`, as in `FluxKontextInpaintPipeline`: a clean picture stands beside."""

    references = ReferencePolicy(replaced=True)


class FluxFill(PackedFlux):
    """The network of the family `flux-fill`, as in `FluxFillPipeline`: masked picture and mask are input channels."""

    blends: Final = False

    @property
    def conditioning(self) -> Mapping[str, int]:
        """The mask is pixel-unshuffled: 16x16 pixels per token for an autoencoder of factor 8."""
        latent = self.out_channels
        return {
            "noise": latent,
            "image_latents": latent,
            "masked_image_latents": latent,
            "mask": self.in_channels - 2 * latent,
        }

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Latents, masked picture's latents, mask: written once, from each sequence's own tensors."""
        image = latents.new_empty(len(latents), self.in_channels)
        width = self.out_channels
        image[:, :width] = latents
        torch.cat([row["masked_image_latents"] for row in conditioning], out=image[:, width : 2 * width])
        torch.cat([row["mask"] for row in conditioning], out=image[:, 2 * width :])
        return image

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masked picture is the picture."""
        return {
            **conditioning,
            "masked_image_latents": conditioning["image_latents"],
            "mask": torch.zeros_like(conditioning["mask"]),
        }


def load(
    network: type[FluxInpaint | FluxFill],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> ModelFamily:
    """The family of a checkpoint; raises as :func:`giornata_denoiser.checkpoint.load`."""
    loaded = network(
        weights.open_network(
            FluxTransformer2DModel, folder, "transformer", dtype=dtype, device=device, quantized=quantized
        )
    )
    return ModelFamily(loaded.text, FlowMatching(flow_scheduler_config(folder), shifted_by_size), loaded)


inpaint = partial(load, FluxInpaint)
kontext = partial(load, FluxKontext)
fill = partial(load, FluxFill)
