"""The baseline that is diffusers itself: its pipeline, called with a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    FluxInpaintPipeline,
)
from torch import Tensor

from giornata_lab.bench.compute.models import TOKEN_PIXELS, module, transformer_of
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.tiny_flux import SCHEDULER
from giornata_lab.bench.compute.workload import WorkloadEdit, square

KLEIN: Final = "flux2-klein"


class StaticBatching:
    """Batches of the unmodified `FluxInpaintPipeline`: all edits of a call take the same number of steps.

    Prompts come as embeddings, as everywhere in these benchmarks.

    Args:
        rows: whose family's transformer is called, in whose sizes.
        autoencoder: of the pipeline; encodes and decodes only where pixels are given.
    """

    def __init__(self, rows: Rows, autoencoder: Any) -> None:
        self._rows = rows
        kind: Any = FluxInpaintPipeline
        self._pipeline = kind(
            scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
            vae=autoencoder,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=transformer_of(rows.family),
        )
        self._pipeline.set_progress_bar_config(disable=True)

    def denoised(self, edits: Sequence[WorkloadEdit], steps: int) -> Tensor:
        """(edits, tokens, channels) final latents: the pipeline without its autoencoder."""
        latents = torch.stack([self._unpacked(self._rows.picture(edit.template)) for edit in edits])
        return self._called(edits, steps, latents, "latent")

    def edited(self, edits: Sequence[WorkloadEdit], steps: int, pictures: Tensor) -> Tensor:
        """(edits, 3, height, width) float pixels: the whole pipeline from `pictures`, pixels in 0..1."""
        return self._called(edits, steps, pictures, "pt")

    def _called(self, edits: Sequence[WorkloadEdit], steps: int, images: Tensor, output: str) -> Tensor:
        rows, family = self._rows, self._rows.family
        pixels = rows.side * TOKEN_PIXELS
        given: Mapping[str, Any] = (
            {"masked_image_latents": images.to(family.device, family.dtype)} if output == "latent" else {}
        )
        found: Tensor = self._pipeline(
            image=images,
            mask_image=torch.stack([_pixel_mask(edit, rows.side) for edit in edits]),
            height=pixels,
            width=pixels,
            strength=1.0,
            num_inference_steps=steps,
            guidance_scale=3.5,
            generator=[torch.Generator().manual_seed(edit.index) for edit in edits],
            output_type=output,
            return_dict=False,
            **{
                name: torch.stack([rows.text(edit.template)[name] for edit in edits]).to(
                    family.device, family.dtype
                )
                for name in ("prompt_embeds", "pooled_prompt_embeds")
            },
            **given,
        )[0]
        return found

    def _unpacked(self, latents: Tensor) -> Tensor:
        return self._rows.family.network.unpacked(latents, (self._rows.side, self._rows.side))


class KleinStaticBatching:
    """Batches of the unmodified `Flux2KleinInpaintPipeline`, from latents and embeddings to latents.

    Its transformer has the weights of the family's, in memory of its own: the engine drives that one's blocks by hooks.

    Args:
        rows: in whose sizes it denoises.
        published: whether the transformer has the published shape, or that of mid-size.
    """

    def __init__(self, rows: Rows, *, published: bool) -> None:
        family = rows.family
        self._rows = rows
        self.transformer: Any = module(KLEIN, published=published, dtype=family.dtype, device=family.device)
        kind: Any = Flux2KleinInpaintPipeline
        self._pipeline = kind(
            scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
            vae=_unused_autoencoder(rows),
            text_encoder=None,
            tokenizer=None,
            transformer=self.transformer,
            is_distilled=True,
        )
        self._pipeline.set_progress_bar_config(disable=True)

    def denoised(self, edits: Sequence[WorkloadEdit], steps: int) -> Tensor:
        """(edits, tokens, channels) final latents: the pipeline without its autoencoder."""
        rows, family = self._rows, self._rows.family
        packed = torch.stack([rows.picture(edit.template) for edit in edits])
        cells = packed.transpose(1, 2).reshape(len(edits), rows.channels, rows.side, rows.side)
        embeds = torch.stack([rows.text(edit.template)["prompt_embeds"] for edit in edits])
        (found,) = self._pipeline(
            image=cells.to(family.device, family.dtype),
            mask_image=torch.stack([_pixel_mask(edit, rows.side) for edit in edits]),
            strength=1.0,
            num_inference_steps=steps,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(edit.index) for edit in edits],
            prompt_embeds=embeds.to(family.device, family.dtype),
            output_type="latent",
            return_dict=False,
        )
        return torch.nn.functional.pixel_unshuffle(found, 2).flatten(2).transpose(1, 2)


def _unused_autoencoder(rows: Rows) -> Any:
    """The pipeline asks an autoencoder for the mean and deviation of latents, here 0 and 1, and for its sizes."""
    kind: Any = AutoencoderKLFlux2
    widths = (8, 8, 8, 8)
    model = kind(
        latent_channels=rows.channels // 4,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        batch_norm_eps=0.0,
    )
    return model.to(rows.family.device, rows.family.dtype).eval().requires_grad_(requires_grad=False)


def in_batches(edits: Sequence[WorkloadEdit], size: int) -> list[tuple[list[WorkloadEdit], int]]:
    """Batches in order of arrival, each padded to the steps of its longest edit."""
    parts = [list(edits[start : start + size]) for start in range(0, len(edits), size)]
    return [(part, max(edit.steps for edit in part)) for part in parts]


def in_equal_batches(edits: Sequence[WorkloadEdit], size: int) -> list[tuple[list[WorkloadEdit], int]]:
    """Batches of equal step counts, in order of arrival among those: nobody takes more steps than asked for."""
    return [
        batch
        for steps in sorted({edit.steps for edit in edits})
        for batch in in_batches([edit for edit in edits if edit.steps == steps], size)
    ]


def _pixel_mask(edit: WorkloadEdit, side: int) -> Tensor:
    """(1, height, width) float32, 1 where the picture is repainted."""
    touched = square(edit, side).float()[None, None]
    return torch.nn.functional.interpolate(touched, scale_factor=TOKEN_PIXELS)[0]
