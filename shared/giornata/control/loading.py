"""A ControlNet's checkpoint, read with its card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import ControlNetModel, SD3ControlNetModel
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel

from giornata.control.flux import FluxControl
from giornata.control.protocol import ControlNet
from giornata.control.sd3 import SD3Control
from giornata.control.unet import UnetControl
from giornata.control_cards import read_control_card
from giornata.weight_loading import load_network
from giornata.wire.adapters import ControlCard, ControlKind

KINDS: Final[dict[ControlKind, tuple[Any, Callable[[Any, ControlCard], ControlNet]]]] = {
    ControlKind.FLUX: (FluxControlNetModel, FluxControl),
    ControlKind.SD3: (SD3ControlNetModel, SD3Control),
    ControlKind.UNET: (ControlNetModel, UnetControl),
}
"""Diffusers' module of each kind, and what runs it."""


def load(folder: Path, dtype: torch.dtype, device: torch.device, name: str | None = None) -> ControlNet:
    """The ControlNet in `folder`; requests call it `name`, by default the folder's. Safetensors alone are read.

    Raises:
        ValueError: it is none, or one that is not served; says why.
        OSError: its weights are missing.
    """
    card = read_control_card(folder, name)
    module, runner = KINDS[card.kind]
    made = load_network(module, folder, dtype=dtype)
    return runner(made.to(device).eval().requires_grad_(requires_grad=False), card)
