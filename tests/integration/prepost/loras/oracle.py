"""LoRAs as PEFT and diffusers make them, and what diffusers makes of a file: the oracle of canonical files."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from giornata_prepost.families.processors import QwenTextProcessor

FILE: Final = "pytorch_lora_weights.safetensors"
TARGETS: Final = {
    "transformer": r".*\.(to_q|to_k|to_out\.0|proj_out|linear|to_qkv|add_k_proj)",
    "unet": r".*\.(to_q|to_out\.0|proj_in|conv1|time_emb_proj|net\.2)",
    "text_encoder": r".*\.(q_proj|v_proj|out_proj|fc1)",
}
"""Modules that get factors, by kind of part."""
ANOTHER: Final = {"transformer": "to_k", "unet": "to_q", "text_encoder": "v_proj"}
"""Those of them that have an alpha of their own."""


@lru_cache(maxsize=2)
def loaded(folder: Path) -> Any:
    """diffusers' pipeline of a checkpoint, float32. Whoever puts a LoRA into it takes it out again."""
    index = json.loads((folder / "model_index.json").read_text())
    own: dict[str, Any] = {}
    if index["_class_name"] == "QwenImage21Pipeline":  # it asks its processor for a template when it is made
        own = {"processor": QwenTextProcessor.of(folder / "processor")}
    elif "processor" in index:  # the part for pictures may need torchvision, and LoRAs need none
        own = {"processor": None}
    elif index["_class_name"] == "Flux2Pipeline":  # likewise, by another name
        own = {"tokenizer": None}
    return getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=torch.float32, **own)


def network_of(pipeline: Any) -> str:
    return "unet" if hasattr(pipeline, "unet") else "transformer"


def texts_of(pipeline: Any) -> list[str]:
    names = [name for name in pipeline._lora_loadable_modules if name.startswith("text_encoder")]
    return [name for name in names if "CLIP" in type(getattr(pipeline, name, None)).__name__]


def saved(
    folder: Path, target: Path, *, rank: int = 4, alpha: int = 2, told: bool = True, seed: int = 0
) -> Path:
    """A LoRA of network and text encoders, by PEFT and the pipeline's own saver; random factors.

    `told`: PEFT's configuration is in the file's metadata. Returns the file.
    """
    torch.manual_seed(seed)
    pipeline = loaded(folder)
    layers: dict[str, Any] = {}
    for part in (network_of(pipeline), *texts_of(pipeline)):
        model = getattr(pipeline, part)
        kind = "text_encoder" if part.startswith("text") else part
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=TARGETS[kind],
            init_lora_weights="gaussian",
            alpha_pattern={ANOTHER[kind]: 3.0},
        )
        model.add_adapter(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        layers[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
        if told:
            layers[f"{part}_lora_adapter_metadata"] = config.to_dict()  # type: ignore[no-untyped-call]  # PEFT annotates it in part
    pipeline.save_lora_weights(target, **layers)
    pipeline.unload_lora_weights()
    return target / FILE


def layers(module: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """The factors of each adapted module, and how often their product counts, as PEFT holds them."""
    adapted: dict[str, Any] = {
        path: layer for path, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)
    }
    return {
        path: (layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach(), layer.scaling[name])
        for path, layer in adapted.items()
        for name in layer.lora_A
    }


def added(folder: Path, file: Path) -> dict[str, Tensor]:
    """What diffusers adds to each weight under a LoRA that it has loaded; text encoders' names begin with theirs."""
    pipeline = loaded(folder)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    parts = {"": network_of(pipeline), **{f"{name}.": name for name in texts_of(pipeline)}}
    changes = {
        f"{prefix}{path}.weight": scale * product(down, up)
        for prefix, part in parts.items()
        for path, (down, up, scale) in layers(getattr(pipeline, part)).items()
    }
    pipeline.unload_lora_weights()
    return {name: change for name, change in changes.items() if change.abs().max() > 0}


def product(down: Tensor, up: Tensor) -> Tensor:
    """The change of a weight, in its shape."""
    return torch.einsum("or,ri->oi", up.flatten(1), down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def products(file: Path) -> dict[str, Tensor]:
    """By the weight's name: the change that a canonical file means."""
    with safe_open(file, framework="pt") as opened_file:
        tensors = {name: opened_file.get_tensor(name).float() for name in opened_file.keys()}  # noqa: SIM118 - it is no dictionary
    paths = [name.removesuffix(".down") for name in tensors if name.endswith(".down")]
    return {f"{path}.weight": product(tensors[f"{path}.down"], tensors[f"{path}.up"]) for path in paths}


def check_equal(canonical: Path, folder: Path, source: Path) -> None:
    """Assert that a canonical file changes what diffusers changes, as much."""
    wanted, found = added(folder, source), products(canonical)
    assert found.keys() == wanted.keys()
    for name, change in wanted.items():
        assert torch.allclose(found[name], change, rtol=1e-4, atol=1e-5), name
