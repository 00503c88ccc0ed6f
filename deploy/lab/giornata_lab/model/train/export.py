"""Last stage: the checkpoint, in diffusers' layout and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import DiffusionPipeline, FluxFillPipeline, StableDiffusionInpaintPipeline

from giornata.model_cards import SERVING, ServingDefaults
from giornata_lab.model import architecture
from giornata_lab.model.painter import Painter
from giornata_lab.model.train import autoencoder, guidance, painter, stage, unet
from giornata_lab.model.train.stage import TrainingStateUnusable
from giornata_lab.model.yardstick import architecture as yardsticks
from giornata_lab.model.yardstick.inpainter import Inpainter

FILL_DEFAULTS: Final = ServingDefaults(steps=20)
"""What requests get that do not say; diffusers' 50 gain nothing on a flow this straight."""
UNET_DEFAULTS: Final = ServingDefaults(steps=unet.STEPS, guidance_scale=unet.GUIDANCE)


def fresco(folder: Path, target: Path) -> None:
    """Write the averaged weights of the last stage in `folder` as a Flux-Fill checkpoint into `target`.

    Raises:
        Unusable: no stage was trained, or the last one was stopped on its way.
    """
    text = architecture.text_encoders()
    trained = Painter(architecture.transformer(), text)
    trained.load_state_dict(ended(folder, guidance.GUIDANCE.title, painter.PAINTER.title)["average"])
    pipeline = FluxFillPipeline(
        scheduler=architecture.scheduler(),
        vae=autoencoder.load(folder),
        text_encoder=text.clip,
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5,
        tokenizer_2=text.t5_tokenizer,
        transformer=trained.transformer,
    )
    _write(pipeline, target, FILL_DEFAULTS)


def yardstick(folder: Path, target: Path) -> None:
    """Write the averaged weights in `folder` as a Stable Diffusion inpainting checkpoint into `target`.

    Raises:
        Unusable: the UNet was not trained, or stopped on its way.
    """
    _write(unet_pipeline(folder, ended(folder, unet.UNET.title)["average"]), target, UNET_DEFAULTS)


def unet_pipeline(folder: Path, weights: Mapping[str, torch.Tensor]) -> StableDiffusionInpaintPipeline:
    """The pipeline of an `Inpainter` of these weights and of the autoencoder in `folder`, in float32."""
    text = yardsticks.text_encoder()
    trained = Inpainter(yardsticks.unet(), text.clip)
    trained.load_state_dict(weights)
    return StableDiffusionInpaintPipeline(
        vae=autoencoder.load(folder),
        text_encoder=text.clip,
        tokenizer=text.tokenizer,
        unet=trained.unet,
        scheduler=yardsticks.scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def ended(folder: Path, *titles: str) -> dict[str, Any]:
    """The state of the first of these stages that has one.

    Raises:
        Unusable: none has, or it was stopped on its way.
    """
    states = [state for title in titles if (state := stage.load(folder / f"{title}.pt"))]
    if not states:
        raise TrainingStateUnusable(
            f"{folder} holds the state of no stage of {' and '.join(titles)}: train first"
        )
    if states[0]["step"] < states[0]["steps"]:
        raise TrainingStateUnusable(
            f"the last stage stopped at step {states[0]['step']} of {states[0]['steps']}: let it end"
        )
    return states[0]


def _write(pipeline: DiffusionPipeline, target: Path, defaults: ServingDefaults) -> None:
    pipeline.to(dtype=torch.bfloat16)
    pipeline.save_pretrained(target, safe_serialization=True)
    for weights in target.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes for the owner alone; services run as others
    (target / SERVING).write_text(defaults.model_dump_json(exclude_none=True) + "\n", encoding="utf-8")
