"""The same edit by diffusers' own pipeline in this process: what the system's picture is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from diffusers import FluxFillPipeline, FluxInpaintPipeline
from PIL import Image
from torch import Generator, float32, set_num_threads

from giornata.checkpoints import checkpoint_folder
from giornata.models import Family, ModelCard, read_model_card
from giornata_prepost.geometry import Size, model_size
from giornata_prepost.inspection import mask_grain, template
from giornata_prepost.masks import Alpha, model_mask
from giornata_prepost.paste import paste
from giornata_prepost.pictures import Picture, Pixels

PIPELINES: Final[dict[Family, type[Any]]] = {
    Family.FLUX_FILL: FluxFillPipeline,
    Family.FLUX_INPAINT: FluxInpaintPipeline,
}


@dataclass(frozen=True)
class Setting:
    """The parameters of the edit; all others are the model's defaults."""

    prompt: str
    seed: int
    steps: int
    torch_threads: int
    """Those of the services: another count rounds differently, by up to one 8-bit step."""


def edit(
    source: str, original: Pixels, alpha: Alpha, budget_pixels: int, setting: Setting
) -> tuple[Pixels, str]:
    """The edited picture and the pipeline's name.

    Args:
        source: the checkpoint, a folder or a hub id whose files the services have fetched already.
        original: (height, width, 3) uint8.
        alpha: (height, width) float32, the effective alpha.
        budget_pixels: most pixels that the model computes.
        setting: of the edit.

    Returns:
        (height, width, 3) uint8, computed in float32 on the CPU and pasted as the system pastes.
    """
    set_num_threads(setting.torch_threads)
    folder = checkpoint_folder(source)
    card = read_model_card(folder)
    size = model_size(Size(original.shape[1], original.shape[0]), budget_pixels, card.pixel_multiple)
    mask = model_mask(alpha, size, mask_grain(card))
    pipeline = PIPELINES[card.family].from_pretrained(folder, dtype=float32)
    pipeline.set_progress_bar_config(disable=True)
    painted = pipeline(
        prompt=setting.prompt,
        image=Image.fromarray(template(Picture(original), size)),
        mask_image=Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))),
        width=size.width,
        height=size.height,
        num_inference_steps=setting.steps,
        max_sequence_length=card.max_text_tokens,
        generator=Generator("cpu").manual_seed(setting.seed),
        output_type="pil",
        **_family_arguments(card),
    ).images[0]
    return paste(original, alpha, np.asarray(painted)), type(pipeline).__name__


def _family_arguments(card: ModelCard) -> dict[str, float]:
    arguments = {"guidance_scale": card.default_guidance_scale} if card.takes_guidance else {}
    return arguments if card.family is Family.FLUX_FILL else {**arguments, "strength": card.default_strength}
