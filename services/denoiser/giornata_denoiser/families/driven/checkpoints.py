"""Checkpoints of the driven families: safetensors and flow matching."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

from giornata_denoiser.families.driven.chroma import Chroma
from giornata_denoiser.families.driven.flux2 import Flux2Klein
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.driven.qwen_image import QwenImage
from giornata_denoiser.families.driven.sd3 import StableDiffusion3
from giornata_denoiser.families.driven.z_image import ZImage
from giornata_denoiser.families.flux.schedule import FlowMatching, scheduler_config
from giornata_denoiser.families.protocol import ModelFamily


def load(
    network: type[DrivenNetwork], kind: Any, folder: Path, dtype: torch.dtype, device: torch.device
) -> ModelFamily:
    """The family of a checkpoint, whose transformer is of the class `kind`.

    Raises:
        ValueError: a scheduler, or a variant of the transformer, that is not served.
        OSError: weights are missing.
    """
    transformer = kind.from_pretrained(
        folder, subfolder="transformer", torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    driven = network(transformer.to(device).eval().requires_grad_(requires_grad=False))
    return ModelFamily(driven.text, FlowMatching(scheduler_config(folder)), driven)


stable_diffusion_3 = partial(load, StableDiffusion3, SD3Transformer2DModel)
z_image = partial(load, ZImage, ZImageTransformer2DModel)
flux2_klein = partial(load, Flux2Klein, Flux2Transformer2DModel)
qwen_image = partial(load, QwenImage, QwenImageTransformer2DModel)
chroma = partial(load, Chroma, ChromaTransformer2DModel)
