"""ControlNets of an engine that asks no instance of the ControlNet service."""

from __future__ import annotations

from collections.abc import Mapping

from giornata.control.networks import ControlNet
from giornata_denoiser.controls.controlnets import ControlDispatcher
from giornata_denoiser.controls.residuals import LocalControls, control_target
from giornata_denoiser.engine.batch_tensors import ControlPart
from giornata_denoiser.families.network import Network


def controls_of(
    nets: Mapping[str, ControlNet],
    network: Network,
    token_pixels: int,
    held_steps: int,
) -> ControlPart:
    """What computes `nets` beside the `network`, which can have some."""
    found = control_target(network, token_pixels)
    assert found is not None
    return ControlDispatcher(LocalControls(nets, found, held_steps), None)
