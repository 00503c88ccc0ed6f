"""The ControlNets that a denoiser is configured with, loaded beside its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.loading import load
from giornata.control.naming import named
from giornata.control.protocol import ControlNet
from giornata_denoiser.controls.networks import ControlNetTarget


def open_controls(
    configured: str, network: ControlNetTarget | None, *, dtype: torch.dtype, device: torch.device
) -> Mapping[str, ControlNet]:
    """The configured ControlNets by digest, with cards that tell their work; a hub id is downloaded first.

    Raises:
        ValueError: there is none of this name, one that is not served, or one that does not fit the `network`.
    """
    checkpoints = named(configured)
    if not checkpoints:
        return {}
    if network is None:
        raise ValueError("diffusers has no ControlNets for the model's family")
    nets = [
        load(checkpoint_folder(checkpoint, CONTROL_FILES), dtype, device, name)
        for name, checkpoint in checkpoints.items()
    ]
    for net in nets:
        net.behind(network.base)
        net.card = net.card.model_copy(update={"work": net.work(network.base)})
    return {net.card.digest: net for net in nets}
