"""Checkpoints of the driven families: safetensors and flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

from giornata.wire.models import FLOW_MATCHING, WITH_LIGHTNING, Sampler
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families import weights
from giornata_denoiser.families.driven.chroma import Chroma
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein, Flux2KleinKV
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.driven.qwen_image import QwenImage, QwenImage21, QwenImageEdit
from giornata_denoiser.families.driven.sd3 import StableDiffusion3
from giornata_denoiser.families.driven.z_image import ZImage
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.sampling.schedules import (
    FlowMatching,
    Spacing,
    flow_scheduler_config,
    shifted_always,
    shifted_by_size,
    shifted_by_steps,
    shifted_evenly,
)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
    *,
    network: type[DrivenNetwork],
    kind: Any,
    spacing: Spacing,
    samplers: Sequence[Sampler] = FLOW_MATCHING,
) -> ModelFamily:
    """The family of a checkpoint, whose transformer is of the class `kind`, and whose pipeline has this `spacing`.

    Raises:
        ValueError: a scheduler, or a variant of the transformer, that is not served.
        OSError: weights are missing.
    """
    driven = network(
        weights.open_network(kind, folder, "transformer", dtype=dtype, device=device, quantized=quantized)
    )
    return ModelFamily(driven.text, FlowMatching(flow_scheduler_config(folder), spacing, samplers), driven)


stable_diffusion_3 = partial(
    load, network=StableDiffusion3, kind=SD3Transformer2DModel, spacing=shifted_always
)
z_image = partial(load, network=ZImage, kind=ZImageTransformer2DModel, spacing=shifted_evenly)
flux2 = partial(load, network=Flux2, kind=Flux2Transformer2DModel, spacing=shifted_by_steps)
flux2_klein = partial(load, network=Flux2Klein, kind=Flux2Transformer2DModel, spacing=shifted_by_steps)
flux2_klein_kv = partial(load, network=Flux2KleinKV, kind=Flux2Transformer2DModel, spacing=shifted_by_steps)
_qwen = partial(load, kind=QwenImageTransformer2DModel, spacing=shifted_by_size, samplers=WITH_LIGHTNING)
qwen_image = partial(_qwen, network=QwenImage)
qwen_image_edit = partial(_qwen, network=QwenImageEdit)
qwen_image_21 = partial(
    load, network=QwenImage21, kind=QwenImage21Transformer2DModel, spacing=shifted_by_size
)
chroma = partial(load, network=Chroma, kind=ChromaTransformer2DModel, spacing=shifted_by_size)
