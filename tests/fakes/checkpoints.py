"""Folders of checkpoints without a network: the JSON files that cards are read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

UNET: Final[dict[str, Any]] = {
    "in_channels": 4,
    "sample_size": 96,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}
SDXL_UNET: Final[dict[str, Any]] = {
    "in_channels": 4,
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
    "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "addition_embed_type": "text_time",
}


def flux_checkpoint(
    folder: Path, pipeline: str = "FluxFillPipeline", *, guidance: bool = True, text_length: object = 48
) -> Path:
    """The JSON files of a checkpoint of Flux and weight files of a few bytes."""
    files: dict[str, dict[str, Any]] = {
        "model_index.json": {"_class_name": pipeline},
        "transformer/config.json": {"guidance_embeds": guidance},
        "vae/config.json": {"block_out_channels": [8, 16, 16, 16], "latent_channels": 16},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": text_length},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "transformer" / "weights.safetensors").write_bytes(bytes(range(256)) * 16384)
    return folder


def checkpoint(
    folder: Path,
    pipeline: str,
    network: dict[str, Any],
    *,
    index: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    tokenizer: str = "tokenizer",
    length: int = 77,
) -> Path:
    """The JSON files of a checkpoint of another family than Flux."""
    part = "unet" if "block_out_channels" in network else "transformer"
    files: dict[str, dict[str, Any]] = {
        "model_index.json": {"_class_name": pipeline} | (index or {}),
        f"{part}/config.json": network,
        "scheduler/scheduler_config.json": {"_class_name": "EulerDiscreteScheduler"} | (scheduler or {}),
        "vae/config.json": vae or {"block_out_channels": [8, 16, 16, 16], "latent_channels": 4},
        f"{tokenizer}/tokenizer_config.json": {"model_max_length": length},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder
