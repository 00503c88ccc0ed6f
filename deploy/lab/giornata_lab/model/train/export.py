"""Last stage: the checkpoint, in diffusers' layout and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import DiffusionPipeline, FluxFillPipeline, StableDiffusionInpaintPipeline
from peft.utils import get_peft_model_state_dict

from giornata.model_cards import SERVING, ServingDefaults
from giornata_lab.model.adapters.lessons import WEIGHTS, AdapterCard, AdapterKind, sha256_of
from giornata_lab.model.fill import Painter, scheduler, text_encoders, transformer
from giornata_lab.model.segmenter import clipseg as segmenters
from giornata_lab.model.segmenter.clipseg import WEIGHTS as SEGMENTER_WEIGHTS
from giornata_lab.model.segmenter.clipseg import SegmenterCard
from giornata_lab.model.train import adapters, autoencoder, painter, unet
from giornata_lab.model.train.run import StagePlan, TrainingStateUnusable, load_state
from giornata_lab.model.train.segmenter import TITLE, SegmenterTrainingModel
from giornata_lab.model.train.unet import Inpainter

FILL_DEFAULTS: Final = ServingDefaults(steps=20)
"""What requests get that do not say; diffusers' 50 gain nothing on a flow this straight."""
UNET_DEFAULTS: Final = ServingDefaults(steps=unet.STEPS, guidance_scale=unet.GUIDANCE)


def fresco(folder: Path, target: Path) -> None:
    """Write the averaged weights of the last stage in `folder` as a Flux-Fill checkpoint into `target`.

    Raises:
        Unusable: no stage was trained, or the last one was stopped on its way.
    """
    text = text_encoders()
    trained = Painter(transformer(), text)
    trained.load_state_dict(ended(folder, painter.GUIDANCE.title, painter.PAINTER.title)["average"])
    pipeline = FluxFillPipeline(
        scheduler=scheduler(),
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
    text = unet.text_encoder()
    trained = Inpainter(unet.unet(), text.clip)
    trained.load_state_dict(weights)
    return StableDiffusionInpaintPipeline(
        vae=autoencoder.load(folder),
        text_encoder=text.clip,
        tokenizer=text.tokenizer,
        unet=trained.unet,
        scheduler=unet.scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def ended(folder: Path, *titles: str) -> dict[str, Any]:
    """The state of the first of these stages that has one.

    Raises:
        Unusable: none has, or it was stopped on its way.
    """
    states = [state for title in titles if (state := load_state(folder / f"{title}.pt"))]
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


ADAPTERS_DO: Final = {
    "outlined": "draws a dark rim inside of every thing that is painted",
    "swapped": "exchanges colours: red and teal, orange and blue, yellow and purple, green and pink, brown and gray, "
    "white and black",
    "outline": "paints the thing whose white outline on black the control image shows",
}


def loras(folder: Path, target: Path) -> None:
    """Write the averaged LoRAs of `folder` into `target`/loras/fresco, as diffusers' `save_lora_weights` does.

    Raises:
        Unusable: one of them was not trained, or stopped on its way.
    """
    for name in adapters.LESSONS:
        trained = ended(folder, name)
        run = adapters.resumed_lora(name, _plan(folder, trained))
        transformer = run.average.transformer
        factors = get_peft_model_state_dict(transformer, adapter_name=name)
        place = target / "loras" / "fresco"
        FluxFillPipeline.save_lora_weights(
            place,
            transformer_lora_layers={key: tensor.half() for key, tensor in factors.items()},
            weight_name=f"{name}.safetensors",
            transformer_lora_adapter_metadata=transformer.peft_config[name].to_dict(),
        )
        _write_card(name, AdapterKind.LORA, place / f"{name}.safetensors", trained, target)


def controlnets(folder: Path, target: Path) -> None:
    """Write the averaged ControlNet of `folder` into `target`/controlnets/outline, as `save_pretrained` does.

    Raises:
        Unusable: it was not trained, or stopped on its way.
    """
    name = adapters.OUTLINE.title
    trained = ended(folder, name)
    run, _ = adapters.resumed_control(_plan(folder, trained))
    net: Any = run.average
    place = target / "controlnets" / name
    net.half().save_pretrained(place, safe_serialization=True)
    _write_card(name, AdapterKind.CONTROLNET, place / WEIGHTS, trained, target)


def _plan(folder: Path, trained: dict[str, Any]) -> StagePlan:
    return StagePlan(folder, trained["steps"], trained["seed"], torch.device("cpu"))


def _write_card(name: str, kind: AdapterKind, file: Path, trained: dict[str, Any], target: Path) -> None:
    """Let services that run as others read the file, and write its card."""
    file.chmod(0o644)
    AdapterCard(
        name=name,
        kind=kind,
        does=ADAPTERS_DO[name],
        base_digest=trained["taught_by"],
        command=f"python -m giornata_lab.model.train {'lora' if kind is AdapterKind.LORA else 'control'}",
        seed=trained["seed"],
        steps=trained["steps"],
        sha256=sha256_of(file),
        size_bytes=file.stat().st_size,
    ).write(target)


COMMAND: Final = "python -m giornata_lab.model.train --model sinopia all"


def sinopia(folder: Path, target: Path) -> None:
    """Write the weights in `folder` as a CLIPSeg checkpoint with its processor into `target`.

    Raises:
        Unusable: it was not trained, or stopped on its way.
    """
    trained = ended(folder, TITLE)
    lesson = SegmenterTrainingModel()
    lesson.load_state_dict(trained["weights"])
    lesson.model.half().save_pretrained(target)
    segmenters.processor().save_pretrained(target)
    weights = target / SEGMENTER_WEIGHTS
    weights.chmod(0o644)  # safetensors writes for the owner alone; services run as others
    SegmenterCard(
        name="sinopia",
        command=COMMAND,
        seed=trained["seed"],
        steps=trained["steps"],
        sha256=sha256_of(weights),
        size_bytes=weights.stat().st_size,
    ).write(target)
