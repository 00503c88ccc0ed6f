"""Edits of scenes by diffusers' own pipelines, with adapters as diffusers' users load them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxControlNetModel, FluxFillPipeline
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.model import latents
from giornata_lab.model.architecture import PATCH_CHANNELS
from giornata_lab.model.scenes import Scene, shapes

Pixels = NDArray[np.uint8]


def edits(
    pipeline: DiffusionPipeline,
    scenes: Sequence[Scene],
    seeds: Sequence[int],
    prompts: Sequence[str] | None = None,
    **options: Any,
) -> list[Pixels]:
    """The edited pictures (side, side, 3): what was painted, pasted into what was there.

    Args:
        pipeline: an inpainting pipeline.
        scenes: of one size.
        seeds: of each edit's noise.
        prompts: by default the scenes' captions.
        options: of the pipeline's call.
    """
    side = scenes[0].before.shape[0]
    painted = pipeline(
        prompt=list(prompts or [scene.caption for scene in scenes]),
        image=[Image.fromarray(scene.before) for scene in scenes],
        mask_image=[shapes.image(scene.mask) for scene in scenes],
        height=side,
        width=side,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        **options,
    ).images
    return [
        np.where(scene.mask[..., None], np.asarray(picture), scene.before)
        for scene, picture in zip(scenes, painted, strict=True)
    ]


def fill_pipeline(checkpoint: Path) -> FluxFillPipeline:
    """The pipeline of a Flux-Fill checkpoint in float32, without a progress bar."""
    pipeline = FluxFillPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def controlled(
    pipeline: FluxFillPipeline, net: FluxControlNetModel, images: Sequence[Pixels], scale: float = 1.0
) -> Iterator[None]:
    """`pipeline` under a ControlNet: diffusers has no pipeline of Fill with one.

    Its unmodified transformer is given the residuals that `net` computes of the noisy latents alone, as
    `FluxControlNetInpaintPipeline` does. Of the control images' posteriors the mode is taken.

    Args:
        pipeline: of one or more edits at once.
        net: the ControlNet.
        images: (side, side, 3), one for each edit.
        scale: as the pipeline's `controlnet_conditioning_scale`.
    """
    pictures = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    control = latents.pack(latents.encode(pipeline.vae, pictures))

    def add(
        _module: torch.nn.Module, _args: object, given: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        names = (
            "encoder_hidden_states", "pooled_projections", "timestep", "guidance", "img_ids", "txt_ids",
        )  # fmt: skip
        double, single = net(
            hidden_states=given["hidden_states"][..., :PATCH_CHANNELS],
            controlnet_cond=control,
            conditioning_scale=scale,
            return_dict=False,
            **{name: given[name] for name in names},
        )
        residuals = {"controlnet_block_samples": double, "controlnet_single_block_samples": single}
        return (), {**given, **residuals}

    hook = pipeline.transformer.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
