"""The transformer of Flux checkpoints, `FluxTransformer2DModel`, over packed sequences, and the text that it takes.

A prompt is embeddings, which pass all blocks, and a pooled vector, which modulates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, cast

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.packed import attention, elementwise
from giornata.packed.moving import moved
from giornata.packed.packing import layout
from giornata.packed.region import Rotary, Sequences
from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use
from giornata.tensors import PROMPT_MASK, padding_tokens
from giornata.wire.blocks import BlockSpec
from giornata_denoiser.families.flux.forward import FluxForward, Parts
from giornata_denoiser.families.flux.modulation import Modulation, prepared, prepared_channels
from giornata_denoiser.families.flux.projections import Projections
from giornata_denoiser.families.protocol import SequenceInputs
from giornata_denoiser.rows.row import Prompt

TRAIN_TIMESTEPS: Final = 1000
"""Timestep = sigma * this; the transformers are trained with it."""
PATCH: Final = 2
"""Latent pixels a side of a token."""


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
class FluxText:
    """What a prompt becomes; satisfies :class:`giornata_denoiser.families.protocol.Text`."""

    tensors: Mapping[str, tuple[int | None, ...]]

    def prompt(
        self,
        tensors: Mapping[str, Tensor],
        grid: tuple[int, int],  # noqa: ARG002 - protocol
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

    sequences: Sequences
    text: Tensor
    """(text_tokens, joint_dim)"""
    modulation: tuple[Tensor, ...]
    """What :func:`giornata_denoiser.families.flux.modulation.prepared` made of each sequence."""


class PackedFlux(ABC):
    """The transformer of Flux checkpoints over packed sequences.

    With :meth:`model_input`, `conditioning`, `unmasked` and `blends` of a subclass it satisfies
    :class:`giornata_denoiser.families.protocol.Network`.
    """

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer: Any = transformer
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self.in_channels = int(transformer.config.in_channels)
        self.out_channels = int(transformer.out_channels)
        each = elementwise.choose(self.device, self.dtype)
        attend = attention.choose(self.device, self.dtype, each.gather)
        self._parts = Parts(transformer, Projections(transformer), attend, each)
        # One per picture size and text length: 4.7 MB for 1024x1024 pixels.
        self._rotary = lru_cache(maxsize=64)(self._made_rotary)

    @property
    def text(self) -> FluxText:
        """The text that the transformer takes: T5's embeddings and CLIP's pooled embedding."""
        config = self.transformer.config
        joint, pooled = int(config.joint_attention_dim), int(config.pooled_projection_dim)
        return FluxText({"prompt_embeds": (None, joint), "pooled_prompt_embeds": (pooled,)})

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
        """See :attr:`giornata_denoiser.families.protocol.Network.prepared_bytes`; 2.1 MB for Flux.1 in 16 bits."""
        return prepared_channels(self.transformer) * self.dtype.itemsize

    def prepare(self, prompt: Prompt, times: Tensor) -> Tensor:
        """(steps, vectors * inner_dim): all adaLN vectors. Rounds to the dtype where diffusers does."""
        model, of = self.transformer, cast("FluxPrompt", prompt)
        scaled = [times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if model.config.guidance_embeds:
            guidance = torch.full_like(times, of.guidance_scale)
            scaled.append(guidance.to(self.dtype) * TRAIN_TIMESTEPS)
        return prepared(model, model.time_text_embed(*scaled, of.pooled.expand(len(times), -1)))

    def companions(self, grid: tuple[int, int], *, generated: bool = False) -> int:  # noqa: ARG002 - protocol
        """None."""
        return 0

    @abstractmethod
    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(tokens, in_channels): what enters the transformer for latents (tokens, channels), packed by sequence."""

    def assemble(self, sequences: Sequence[SequenceInputs]) -> FluxBatch:
        """See :meth:`giornata_denoiser.families.protocol.Network.assemble`."""
        prompts = [cast("FluxPrompt", sequence.prompt) for sequence in sequences]
        lengths = [prompt.joint_tokens for prompt in prompts]
        cells = [sequence.grid[0] * sequence.grid[1] for sequence in sequences]
        rotary = [
            self._rotary(text, sequence.grid) for text, sequence in zip(lengths, sequences, strict=True)
        ]
        return FluxBatch(
            Sequences(
                layout(lengths, cells, self.device),
                (torch.cat([cosine for cosine, _ in rotary]), torch.cat([sine for _, sine in rotary])),
                tuple(sequence.region for sequence in sequences),
                tuple(prompt.padding_tokens for prompt in prompts),
            ),
            torch.cat([prompt.embeds for prompt in prompts]),
            tuple(cast("Tensor", sequence.prepared) for sequence in sequences),
        )

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[Use] = (),
        trace: Tracing = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.predict`; the output is a velocity."""
        if not isinstance(batch, FluxBatch):
            raise TypeError(f"expected a batch of Flux, received {type(batch).__name__}")
        image = self.model_input(latents, conditioning)
        modulation = Modulation(self.transformer, batch.modulation, steps)
        forward = FluxForward(self._parts, batch.sequences, modulation, uses, trace=trace)
        return forward.run(batch.text, image)

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance: negative + scale * (positive - negative)."""
        return negative + (scale * (positive - negative).float()).to(positive.dtype)

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`; the inverse of `_pack_latents`."""
        height, width = grid
        patches = latent.view(height, width, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        return patches.reshape(-1, height * PATCH, width * PATCH)

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`; `_pack_latents` of the pipeline."""
        channels, height, width = pixels.shape
        patches = pixels.view(channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * PATCH * PATCH)

    def _made_rotary(self, text_tokens: int, grid: tuple[int, int]) -> Rotary:
        """Rotary embedding, text then image: text is at (0, 0, 0), the token of line y and column x at (0, y, x)."""
        ids = torch.zeros(text_tokens + grid[0] * grid[1], 3, device=self.device)
        ids[text_tokens:, 1] = torch.arange(grid[0], device=self.device).repeat_interleave(grid[1])
        ids[text_tokens:, 2] = torch.arange(grid[1], device=self.device).repeat(grid[0])
        rotary: Rotary = self.transformer.pos_embed(ids)
        return rotary
