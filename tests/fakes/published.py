"""Folders of published checkpoints without their weights: configurations, and headers that tell the weights' sizes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fakes.checkpoints import SDXL_UNET

KL: Final[dict[str, Any]] = {
    "block_out_channels": [128, 256, 512, 512],
    "latent_channels": 16,
    "sample_size": 1024,
}


class Published(NamedTuple):
    """A checkpoint: its pipeline, configurations, and billions of weights by component."""

    pipeline: str
    network: dict[str, Any]
    autoencoder: dict[str, Any]
    billions: dict[str, float]


FLUX: Final = Published(
    "FluxPipeline",
    {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "attention_head_dim": 128}
    | {"guidance_embeds": True},
    KL,
    {"transformer": 11.90, "text_encoder": 0.123, "text_encoder_2": 4.762, "vae": 0.084},
)
QWEN_IMAGE: Final = Published(
    "QwenImagePipeline",
    {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128},
    {"base_dim": 96, "z_dim": 16, "temperal_downsample": [False, True, True]},
    {"transformer": 20.43, "text_encoder": 8.292, "vae": 0.127},
)
Z_IMAGE: Final = Published(
    "ZImagePipeline",
    {"dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30},
    KL,
    {"transformer": 6.155, "text_encoder": 4.022, "vae": 0.084},
)
SDXL: Final = Published(
    "StableDiffusionXLPipeline",
    SDXL_UNET,
    KL | {"latent_channels": 4, "force_upcast": True},
    {"unet": 2.567, "text_encoder": 0.123, "text_encoder_2": 0.695, "vae": 0.084},
)
PUBLISHED: Final = {"flux": FLUX, "qwen-image": QWEN_IMAGE, "z-image": Z_IMAGE, "sdxl": SDXL}


def published(folder: Path, name: str) -> Path:
    """Write the checkpoint of a name to `folder`."""
    one = PUBLISHED[name]
    index = {"_class_name": one.pipeline} | {part: ["library", "Class"] for part in one.billions}
    files = {
        "model_index.json": index,
        "scheduler/scheduler_config.json": {"_class_name": "EulerDiscreteScheduler"},
        "vae/config.json": one.autoencoder,
        f"{next(iter(one.billions))}/config.json": one.network,
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    for part, billions in one.billions.items():
        write_header(folder / part / "model.safetensors", round(billions * 1e9))
    return folder


def write_header(file: Path, numbers: int) -> None:
    """Write a safetensors header of one bfloat16 tensor, and nothing of the tensor."""
    tensor = {"dtype": "BF16", "shape": [numbers], "data_offsets": [0, 2 * numbers]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(header)) + header)
