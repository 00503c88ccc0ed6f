"""The ControlNets that a denoiser is configured with, loaded beside its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.control.loading import load
from giornata.control.protocol import ControlNet
from giornata_denoiser.controls.networks import Controlled

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


def named(configured: str) -> dict[str, str]:
    """Checkpoints by name, of ``NAME=CHECKPOINT,NAME=CHECKPOINT``; a checkpoint alone is called as its folder.

    ValueError where a name is given twice, or is none.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in configured.split(","))):
        name, equals, checkpoint = entry.partition("=")
        if not equals:
            name, checkpoint = Path(entry).resolve().name, entry
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a ControlNet: letters, digits, _ . -")
        if name in found:
            raise ValueError(f"two ControlNets are called {name}")
        found[name] = checkpoint
    return found


def open_controls(
    configured: str, network: Controlled | None, *, dtype: torch.dtype, device: torch.device
) -> Mapping[str, ControlNet]:
    """The configured ControlNets by digest; a hub id is downloaded first.

    Raises:
        ValueError: there is none of this name, one that is not served, or one that does not fit the `network`.
    """
    checkpoints = named(configured)
    if not checkpoints:
        return {}
    if network is None:
        raise ValueError("diffusers has no ControlNets for the model's family")
    nets = [
        load(checkpoint_folder(checkpoint), dtype, device, name) for name, checkpoint in checkpoints.items()
    ]
    for net in nets:
        net.behind(network.base)
    return {net.card.digest: net for net in nets}
