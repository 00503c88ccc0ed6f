"""ControlNets of an engine that asks no instance of the ControlNet service."""

from __future__ import annotations

from collections.abc import Mapping

from giornata.control.protocol import ControlNet
from giornata_denoiser.controls.executing import ControlDispatcher
from giornata_denoiser.controls.local import LocalControls
from giornata_denoiser.controls.networks import controlled
from giornata_denoiser.engine.controls import ControlExecutor
from giornata_denoiser.families.protocol import Network


def controls_of(
    nets: Mapping[str, ControlNet],
    network: Network,
    token_pixels: int,
    held_steps: int,
) -> ControlExecutor:
    """What computes `nets` beside the `network`, which can have some."""
    found = controlled(network, token_pixels)
    assert found is not None
    return ControlDispatcher(LocalControls(nets, found, held_steps), None)
