"""Diffusers' pipeline of a checkpoint, called with a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import (
    ChromaInpaintPipeline,
    Flux2KleinInpaintPipeline,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    QwenImageInpaintPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    ZImageInpaintPipeline,
)
from PIL import Image

from giornata.checkpoints import checkpoint_folder, pipeline_variant
from giornata.families import Family
from giornata.model_cards import read_model_card

PIPELINES: Final[dict[str, type[Any]]] = {
    Family.FLUX_FILL: FluxFillPipeline,
    Family.FLUX_INPAINT: FluxInpaintPipeline,
    Family.FLUX_KONTEXT: FluxKontextInpaintPipeline,
    Family.SD: StableDiffusionInpaintPipeline,
    Family.SD_INPAINT: StableDiffusionInpaintPipeline,
    Family.SDXL: StableDiffusionXLInpaintPipeline,
    Family.SDXL_INPAINT: StableDiffusionXLInpaintPipeline,
    Family.SD3: StableDiffusion3InpaintPipeline,
    Family.Z_IMAGE: ZImageInpaintPipeline,
    Family.FLUX2_KLEIN: Flux2KleinInpaintPipeline,
    Family.QWEN_IMAGE: QwenImageInpaintPipeline,
    Family.CHROMA: ChromaInpaintPipeline,
}
PADDED_AS_CARDED: Final = frozenset({Family.FLUX_FILL, Family.FLUX_INPAINT, Family.FLUX_KONTEXT})
"""Families whose pipelines pad prompts to the card's length; of others, their own default is the card's."""


@dataclass(frozen=True)
class PipelineCallSettings:
    """What the rows of one call share; None is the model's own default."""

    width: int
    height: int
    steps: int | None
    guidance_scale: float | None
    strength: float | None


@dataclass(frozen=True)
class PipelineRow:
    """One picture that is to be painted."""

    prompt: str
    image: Image.Image
    """RGB."""
    mask: Image.Image
    """L, white where it is repainted; of the image's size."""
    seed: int


class Pipeline:
    """A checkpoint's pipeline for inpainting: the family's own where Giornata serves it, else what diffusers finds."""

    def __init__(self, source: str, device: torch.device, dtype: torch.dtype) -> None:
        """Load `source`, a diffusers folder or a hub id."""
        folder = checkpoint_folder(source)
        kind, self.defaults = _found(folder)
        self.name = Path(source).name
        self._pipeline = opened(kind, folder, dtype=dtype).to(device)
        self.kind: Final = type(self._pipeline).__name__

    def paint(self, rows: Sequence[PipelineRow], alike: PipelineCallSettings) -> list[Image.Image]:
        """The pictures of `rows`, computed as one batch; each draws its noise from its own seed."""
        told = {
            "num_inference_steps": alike.steps,
            "guidance_scale": alike.guidance_scale,
            "strength": alike.strength,
        }
        given = {name: value for name, value in told.items() if value is not None}
        found: list[Image.Image] = self._pipeline(
            prompt=[row.prompt for row in rows],
            image=[row.image for row in rows],
            mask_image=[row.mask for row in rows],
            width=alike.width,
            height=alike.height,
            generator=[torch.Generator().manual_seed(row.seed) for row in rows],
            output_type="pil",
            **{**self.defaults, **given},
        ).images
        return found


def opened(kind: Any, folder: Path, **options: object) -> Any:
    """The pipeline of `kind` from `folder`, silent.

    `ChromaInpaintPipeline` reads an entry of its network's configuration that the network's own class never writes.
    """
    pipeline = kind.from_pretrained(folder, variant=pipeline_variant(folder), **options)
    pipeline.set_progress_bar_config(disable=True)
    if isinstance(pipeline, ChromaInpaintPipeline):
        pipeline.transformer.register_to_config(guidance_embeds=False)
    return pipeline


def _found(folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """The pipeline's class, and what calls of it say unless a request does; ValueError if diffusers has none."""
    try:
        card = read_model_card(folder)
    except ValueError:  # a family that Giornata does not serve: diffusers' own defaults hold
        from diffusers import AutoPipelineForInpainting  # noqa: PLC0415 - it imports every pipeline there is

        return AutoPipelineForInpainting, {}
    if card.family not in PIPELINES:
        raise ValueError(
            f"diffusers has no inpainting pipeline for {card.family} that takes a size; it has one for "
            + ", ".join(PIPELINES)
        )
    guided = {"guidance_scale": card.default_guidance_scale} if card.takes_guidance else {}
    own_size = {"_auto_resize": False} if card.family == Family.FLUX_KONTEXT else {}
    padded = {"max_sequence_length": card.max_text_tokens} if card.family in PADDED_AS_CARDED else {}
    return PIPELINES[card.family], {
        "num_inference_steps": card.default_steps,
        "strength": card.default_strength,
        **padded,
        **own_size,
        **guided,
    }
