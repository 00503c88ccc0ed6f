"""A ControlNet's checkpoint, read with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from diffusers import ControlNetModel
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel

from giornata.control_cards import read_control_card
from giornata.wire.adapters import ControlCard, ControlKind

MODULES: Final[dict[ControlKind, Any]] = {
    ControlKind.FLUX: FluxControlNetModel,
    ControlKind.UNET: ControlNetModel,
}


def loaded(
    kind: ControlKind, folder: Path, dtype: torch.dtype, device: torch.device, name: str | None
) -> tuple[Any, ControlCard]:
    """The ControlNet in `folder`, diffusers' module of its `kind`, on `device`; and its card.

    Safetensors alone are read.

    Raises:
        ValueError: it is none of `kind`, or one that is not served; says why.
    """
    card = read_control_card(folder, name)
    if card.kind is not kind:
        raise ValueError(f"{folder} is a ControlNet of {card.kind}; this one loads those of {kind}")
    made = MODULES[kind].from_pretrained(
        folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    return made.to(device).eval().requires_grad_(requires_grad=False), card
