"""Builds a small checkpoint of a family with random weights, in diffusers' layout and without a download.

``python -m giornata_lab.model.random.build FOLDER --family flux-inpaint [--seed 0]``

The folder loads with the family's inpainting pipeline like a published checkpoint; equal seeds give equal bytes. What
it paints is texture: it exercises the system, it knows nothing of pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline, FluxKontextInpaintPipeline

from giornata.families import Family
from giornata_lab.model.random.flow_transformers import (
    chroma,
    flux,
    flux2,
    flux2_klein,
    flux2_klein_kv,
    qwen_image,
    qwen_image_21,
    qwen_image_edit,
    qwen_image_edit_plus,
    z_image,
)
from giornata_lab.model.random.stable_diffusion import (
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
)

BUILDERS: Final[dict[Family, Callable[[], Any]]] = {
    Family.FLUX_INPAINT: partial(flux, FluxInpaintPipeline),
    Family.FLUX_KONTEXT: partial(flux, FluxKontextInpaintPipeline),
    Family.FLUX_FILL: partial(flux, FluxFillPipeline),
    Family.SD: partial(stable_diffusion, 4),
    Family.SD_INPAINT: partial(stable_diffusion, 9),
    Family.SDXL: partial(stable_diffusion_xl, 4),
    Family.SDXL_INPAINT: partial(stable_diffusion_xl, 9),
    Family.SD3: stable_diffusion_3,
    Family.Z_IMAGE: z_image,
    Family.FLUX2: flux2,
    Family.FLUX2_KLEIN: flux2_klein,
    Family.FLUX2_KLEIN_KV: flux2_klein_kv,
    Family.QWEN_IMAGE: qwen_image,
    Family.QWEN_IMAGE_EDIT: qwen_image_edit,
    Family.QWEN_IMAGE_EDIT_PLUS: qwen_image_edit_plus,
    Family.QWEN_IMAGE_21: qwen_image_21,
    Family.CHROMA: chroma,
}
"""Makes a diffusers pipeline of each family, of weights from torch's global generator."""


def build(family: Family, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of `family` into `folder`, which is made where it does not exist.

    Args:
        family: decides the pipeline, and the input channels of its network.
        folder: receives `model_index.json` and one sub-folder per component.
        seed: of every weight; the process's own random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[family]()
    pipeline.save_pretrained(folder, safe_serialization=True)


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--family", type=click.Choice([str(family) for family in Family]), default=str(Family.FLUX_INPAINT)
)
@click.option("--seed", type=int, default=0, help="Of the weights.")
def main(folder: Path, family: str, seed: int) -> None:
    """Build a checkpoint with random weights in FOLDER."""
    build(Family(family), folder, seed)


if __name__ == "__main__":
    main()
