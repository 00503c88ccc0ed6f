"""Last stage of an adapter: its file in diffusers' layout and in float16, and its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from diffusers import FluxFillPipeline
from peft.utils import get_peft_model_state_dict

from giornata_lab.model.adapters.card import WEIGHTS, AdapterCard, AdapterKind, sha256_of
from giornata_lab.model.train import control, lora
from giornata_lab.model.train.export import ended
from giornata_lab.model.train.stage import StagePlan

DOES: Final = {
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
    for name in lora.LESSONS:
        trained = ended(folder, name)
        run = lora.resumed(name, _plan(folder, trained))
        transformer = run.average.transformer
        factors = get_peft_model_state_dict(transformer, adapter_name=name)
        place = target / "loras" / "fresco"
        FluxFillPipeline.save_lora_weights(
            place,
            transformer_lora_layers={key: tensor.half() for key, tensor in factors.items()},
            weight_name=f"{name}.safetensors",
            transformer_lora_adapter_metadata=transformer.peft_config[name].to_dict(),
        )
        _finish(name, AdapterKind.LORA, place / f"{name}.safetensors", trained, target)


def controlnets(folder: Path, target: Path) -> None:
    """Write the averaged ControlNet of `folder` into `target`/controlnets/outline, as `save_pretrained` does.

    Raises:
        Unusable: it was not trained, or stopped on its way.
    """
    name = control.OUTLINE.title
    trained = ended(folder, name)
    run, _ = control.resumed(_plan(folder, trained))
    net: Any = run.average
    place = target / "controlnets" / name
    net.half().save_pretrained(place, safe_serialization=True)
    _finish(name, AdapterKind.CONTROLNET, place / WEIGHTS, trained, target)


def _plan(folder: Path, trained: dict[str, Any]) -> StagePlan:
    return StagePlan(folder, trained["steps"], trained["seed"], torch.device("cpu"))


def _finish(name: str, kind: AdapterKind, file: Path, trained: dict[str, Any], target: Path) -> None:
    """Let services that run as others read the file, and write its card."""
    file.chmod(0o644)
    AdapterCard(
        name=name,
        kind=kind,
        does=DOES[name],
        base_digest=trained["taught_by"],
        command=f"python -m giornata_lab.model.train {'lora' if kind is AdapterKind.LORA else 'control'}",
        seed=trained["seed"],
        steps=trained["steps"],
        sha256=sha256_of(file),
        size_bytes=file.stat().st_size,
    ).write(target)
