"""Loading Flux checkpoints; safetensors only."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from giornata_denoiser.families.flux.fill import FluxFill
from giornata_denoiser.families.flux.inpaint import FluxInpaint
from giornata_denoiser.families.flux.schedule import FlowMatching, scheduler_config
from giornata_denoiser.families.protocol import ModelFamily


def load_inpaint(folder: Path, dtype: torch.dtype, device: torch.device) -> ModelFamily:
    """The family `flux-inpaint` of a checkpoint; raises as :func:`giornata_denoiser.checkpoint.load`."""
    return _family(folder, FluxInpaint(_transformer(folder, dtype, device)))


def load_fill(folder: Path, dtype: torch.dtype, device: torch.device) -> ModelFamily:
    """The family `flux-fill` of a checkpoint; raises as :func:`giornata_denoiser.checkpoint.load`."""
    return _family(folder, FluxFill(_transformer(folder, dtype, device)))


def _family(folder: Path, network: FluxInpaint | FluxFill) -> ModelFamily:
    return ModelFamily(network.text, FlowMatching(scheduler_config(folder)), network)


def _transformer(folder: Path, dtype: torch.dtype, device: torch.device) -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel.from_pretrained(
        folder, subfolder="transformer", torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    return transformer.to(device).eval().requires_grad_(requires_grad=False)
