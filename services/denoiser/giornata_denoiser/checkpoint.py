"""Loading transformer, scheduler configuration and preview map of a local diffusers checkpoint; safetensors only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from giornata.checkpoints import checkpoint_folder
from giornata.wire import models
from giornata.wire.errors import Failed
from giornata.wire.models import ModelCard, read_model_card
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.flux.fill import FluxFill
from giornata_denoiser.families.flux.inpaint import FluxInpaint
from giornata_denoiser.families.preview_map import PreviewMap, fit_autoencoder
from giornata_denoiser.families.protocol import Family

FAMILIES: Final[dict[models.Family, type[FluxInpaint | FluxFill]]] = {
    models.Family.FLUX_INPAINT: FluxInpaint,
    models.Family.FLUX_FILL: FluxFill,
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What the denoiser needs of a checkpoint."""

    card: ModelCard
    family: Family
    scheduler: Mapping[str, Any]
    """Configuration of `FlowMatchEulerDiscreteScheduler`."""
    preview_map: PreviewMap
    """What previews are seen through; of the checkpoint's own autoencoder."""


def open_checkpoint(config: DenoiserConfig) -> Checkpoint:
    """Load the configured checkpoint; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or none that is served.
    """
    try:
        folder = checkpoint_folder(config.model)
        device, dtype = config.torch_device(), config.torch_dtype()
        return load(folder, dtype=dtype, device=device, name=config.served_name)
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error


def load(folder: Path, *, dtype: torch.dtype, device: torch.device, name: str | None = None) -> Checkpoint:
    """Load the checkpoint in `folder`.

    Args:
        folder: a diffusers folder.
        dtype: of the transformer's weights and of all its rows.
        device: where it runs.
        name: how requests call the model; default the folder's name.

    Raises:
        ValueError: a family, a scheduler or a sampling rule that is not served; says what is.
        OSError: weights are missing.
    """
    card = read_model_card(folder, name)
    preview_map = fit_autoencoder(folder, device)  # before the transformer: never both in memory
    transformer = FluxTransformer2DModel.from_pretrained(
        folder, subfolder="transformer", torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    transformer = transformer.to(device).eval().requires_grad_(requires_grad=False)
    return Checkpoint(card, FAMILIES[card.family](transformer), scheduler_config(folder), preview_map)


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The scheduler's configuration, if it samples as `sigmas.euler_step` does; ValueError otherwise."""
    config: dict[str, Any] = FlowMatchEulerDiscreteScheduler.load_config(
        folder, subfolder="scheduler", local_files_only=True
    )
    kind = config.get("_class_name")
    if kind != FlowMatchEulerDiscreteScheduler.__name__:
        raise ValueError(f"{folder} has a {kind}; served is {FlowMatchEulerDiscreteScheduler.__name__}")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            raise ValueError(f"{folder}: the scheduler option {option} is not served")
    return config
