"""A ControlNet's checkpoint, read with its card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import torch

from giornata.control.protocol import ControlNet
from giornata.control_cards import read_control_card
from giornata.weight_loading import load_network
from giornata.wire.adapters import ControlCard, ControlKind

KINDS: Final = {
    ControlKind.FLUX: ("diffusers:FluxControlNetModel", "giornata.control.flux:FluxControl"),
    ControlKind.SD3: ("diffusers:SD3ControlNetModel", "giornata.control.sd3:SD3Control"),
    ControlKind.UNET: ("diffusers:ControlNetModel", "giornata.control.unet:UnetControl"),
}
"""Diffusers' module of each kind, and what runs it."""


def imported(kind: ControlKind) -> tuple[Any, Callable[[Any, ControlCard], ControlNet]]:
    """Diffusers' module of a kind, and what runs it; no other kind is imported."""
    module, runner = map(resolve_name, KINDS[kind])
    return module, runner


def load(folder: Path, dtype: torch.dtype, device: torch.device, name: str | None = None) -> ControlNet:
    """The ControlNet in `folder`; requests call it `name`, by default the folder's. Safetensors alone are read.

    Raises:
        ValueError: it is none, or one that is not served; says why.
        OSError: its weights are missing.
    """
    card = read_control_card(folder, name)
    module, runner = imported(card.kind)
    made = load_network(module, folder, dtype=dtype)
    return runner(made.to(device).eval().requires_grad_(requires_grad=False), card)
