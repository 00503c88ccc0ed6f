"""The ControlNets that a denoiser is configured with, loaded beside its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.control.expansion import Blocks
from giornata.control.flux import FluxControl, load
from giornata_denoiser.controls.flux import FluxControls
from giornata_denoiser.engine.controls import Controls, NoControls
from giornata_denoiser.families.flux.transformer import PackedFlux
from giornata_denoiser.families.protocol import Network

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
    configured: str, network: Network, *, dtype: torch.dtype, device: torch.device
) -> Mapping[str, FluxControl]:
    """The configured ControlNets by digest; a hub id is downloaded first.

    Raises:
        ValueError: there is none of this name, one that is not served, or one that does not fit the `network`.
    """
    checkpoints = named(configured)
    if checkpoints and not isinstance(network, PackedFlux):
        raise ValueError("ControlNets are computed for the families of Flux alone so far")
    nets = [
        load(checkpoint_folder(checkpoint), dtype, device, name) for name, checkpoint in checkpoints.items()
    ]
    for net in nets:
        _check(net, network)
    return {net.card.digest: net for net in nets}


def controls_of(nets: Mapping[str, FluxControl], network: Network, held_steps: int) -> Controls:
    """What computes `nets` beside the `network`."""
    if not nets or not isinstance(network, PackedFlux):
        return NoControls()
    model = network.transformer
    base = Blocks(len(model.transformer_blocks), len(model.single_transformer_blocks))
    return FluxControls(nets, base, held_steps=held_steps)


def _check(net: FluxControl, network: Network) -> None:
    """ValueError where the samples of `net` do not fit the `network`, or the latents and texts do not fit the net."""
    config, model = net.net.config, network.transformer  # type: ignore[attr-defined]  # PackedFlux's
    pairs = (
        ("width of blocks", net.net.inner_dim, model.inner_dim),
        ("channels of latents", config.in_channels, model.out_channels),
        ("width of text", config.joint_attention_dim, model.config.joint_attention_dim),
        ("width of pooled text", config.pooled_projection_dim, model.config.pooled_projection_dim),
        ("double blocks", min(net.samples.double, len(model.transformer_blocks)), net.samples.double),
        ("single blocks", min(net.samples.single, len(model.single_transformer_blocks)), net.samples.single),
    )
    for what, own, others in pairs:
        if own != others:
            raise ValueError(
                f"the ControlNet {net.card.name} does not fit: {what} {own}, and the model's {others}"
            )
