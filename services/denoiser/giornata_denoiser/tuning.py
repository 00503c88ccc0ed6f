"""From configuration and profile to what the engine is told."""

from __future__ import annotations

from typing import Final

import torch

from giornata.planning.batch import PLANNERS
from giornata.planning.profile import Profile
from giornata_denoiser.batch import Capacity
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine import CostModel, Reusing
from giornata_denoiser.reuse.device import device_for
from giornata_denoiser.reuse.loader import Loader
from giornata_denoiser.weighing import Budget

MIB: Final = 20
SPARED: Final = 0.9
"""Of a GPU's free memory, where no budget is configured."""


def capacity_of(config: DenoiserConfig) -> Capacity:
    """Of one step, by counts."""
    return Capacity(config.capacity_rows, config.capacity_tokens)


def budget_of(config: DenoiserConfig, profile: Profile, device: torch.device) -> Budget:
    """Of one step, by time and memory; call it once the model is on the device."""
    unlimited = Budget()
    return Budget(
        step_ms=config.step_limit_ms or unlimited.step_ms,
        memory_bytes=_memory_bytes(config.memory_mb, device),
        activation_bytes=profile.activation_bytes,
        caps=profile.caps if config.batch_caps else (),
    )


def reusing_of(config: DenoiserConfig, model: CostModel, loader: Loader, device: torch.device) -> Reusing:
    """How templates are taken from."""
    return Reusing(
        loader=loader,
        model=model,
        planner=PLANNERS[config.planner],
        device=device_for(device, config.template_device_mb << MIB),
        ahead_bytes=config.template_ahead_mb << MIB,
        correction_bits=config.template_bits if config.template_correction else None,
    )


def _memory_bytes(configured_mb: int | None, device: torch.device) -> float:
    if configured_mb is not None:
        return configured_mb << MIB
    if device.type != "cuda":
        return Budget().memory_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return SPARED * free
