"""Loading family and preview map of a local diffusers checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.control.networks import ControlNet
from giornata.families import Family, when_called
from giornata.gpus import DeviceLedger, host_device
from giornata.model_cards import ModelMemory, model_memory, read_model_card
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import Failed
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.residuals import control_target, open_controls
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap, fit_autoencoder
from giornata_denoiser.families.weights import OUTLINE, check

LOADERS: Final[dict[str, Callable[[Path, torch.dtype, torch.device, WeightQuantization], ModelFamily]]] = {
    family: when_called(f"giornata_denoiser.families.{name}.load")
    for family, name in {
        Family.FLUX_INPAINT: "flux:FluxInpaint",
        Family.FLUX_KONTEXT: "flux:FluxKontext",
        Family.FLUX_FILL: "flux:FluxFill",
        Family.SD: "unet.network:UnetInpaint",
        Family.SD_INPAINT: "unet.network:UnetInpaint",
        Family.SDXL: "unet.network:UnetInpaint",
        Family.SDXL_INPAINT: "unet.network:UnetInpaint",
        Family.SD3: "driven.sd3:StableDiffusion3",
        Family.Z_IMAGE: "driven.z_image:ZImage",
        Family.FLUX2: "driven.flux2:Flux2",
        Family.FLUX2_KLEIN: "driven.flux2:Flux2Klein",
        Family.FLUX2_KLEIN_KV: "driven.flux2:Flux2KleinKV",
        Family.QWEN_IMAGE: "driven.qwen_image:QwenImage",
        Family.QWEN_IMAGE_EDIT: "driven.qwen_image:QwenImageEdit",
        Family.QWEN_IMAGE_EDIT_PLUS: "driven.qwen_image:QwenImageEdit",
        Family.QWEN_IMAGE_21: "driven.qwen_image:QwenImage21",
        Family.CHROMA: "driven.chroma:Chroma",
    }.items()
}
"""What loads the family of a checkpoint's folder; no other family is imported."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The parts of a checkpoint that the denoiser needs."""

    card: ModelCard
    family: ModelFamily
    preview_map: PreviewMap | None
    """What previews are seen through; of the checkpoint's own autoencoder. None of an outline."""
    controlnets: Mapping[str, ControlNet] = field(default_factory=dict)
    """Those that this process computes, by digest."""
    rank_controls: tuple[ControlCard, ...] = ()
    """Those that each rank of a pool computes; of an outline."""
    ledger: DeviceLedger = field(default_factory=DeviceLedger)
    """Where this process states what it needs of its GPU."""
    memory: ModelMemory | None = None
    """What the checkpoint takes of that; None without a ledger."""
    control_cards: Mapping[str, ControlCard] = field(init=False)
    """The ControlNets that are computed beside it, by digest."""

    def __post_init__(self) -> None:
        own = (net.card for net in self.controlnets.values())
        object.__setattr__(self, "control_cards", {card.digest: card for card in (*own, *self.rank_controls)})


def open_checkpoint(config: DenoiserConfig) -> Checkpoint:
    """Load the configured checkpoint and ControlNets; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or none that is served.
    """
    dtype, device = config.torch_dtype(), config.torch_device()
    check(config.quantize, device)
    found = _loaded(config, device, config.quantize)
    try:
        network = control_target(found.family.network, found.card.pixel_multiple)
        nets = open_controls(config.controlnets, network, dtype=dtype, device=device)
    except (ValueError, OSError) as error:
        raise Failed(f"The ControlNets {config.controlnets} cannot be loaded: {error}") from error
    return replace(found, controlnets=nets)


def state_memory(
    config: DenoiserConfig, folder: Path, device: torch.device
) -> tuple[DeviceLedger, ModelMemory | None]:
    """A ledger with what a denoiser needs of its GPU at least, the network and a row of the native size; and why."""
    if device.type != "cuda" or config.device_ledger is None:
        return DeviceLedger(), None
    ledger = DeviceLedger(config.device_ledger, host_device(device).id, ServiceName.DENOISER)
    quantized = config.quantize is not WeightQuantization.OFF
    model = model_memory(folder, config.torch_dtype().itemsize, quantized=quantized)
    ledger.state(model.denoiser(read_model_card(folder).native_size ** 2))
    return ledger, model


def open_outline(config: DenoiserConfig) -> Checkpoint:
    """The configured checkpoint without weights: what it is called, what rows it takes and what its blocks compute.

    Raises:
        Failed: there is no such checkpoint, or none that is served.
    """
    return _loaded(config, OUTLINE)


def _loaded(
    config: DenoiserConfig, device: torch.device, quantized: WeightQuantization = WeightQuantization.OFF
) -> Checkpoint:
    try:
        folder, dtype, name = checkpoint_folder(config.model), config.torch_dtype(), config.served_name
        ledger, memory = state_memory(config, folder, device)
        found = load(folder, dtype=dtype, device=device, name=name, quantized=quantized)
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error
    return replace(found, ledger=ledger, memory=memory)


def load(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    name: str | None = None,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> Checkpoint:
    """Load the checkpoint in `folder`, a diffusers folder; requests call it by `name`, default the folder's.

    On the device :data:`OUTLINE` no weights are read.

    Raises:
        ValueError: a family, a scheduler or a sampling rule that is not served; says what is.
        OSError: weights are missing.
    """
    card = read_model_card(folder, name)
    if card.family not in LOADERS:
        raise ValueError(f"{folder} is of the family {card.family}; denoised are {', '.join(LOADERS)}")
    if device == OUTLINE:
        return Checkpoint(card, LOADERS[card.family](folder, dtype, device, WeightQuantization.OFF), None)
    preview_map = fit_autoencoder(folder, device)  # before the network: never both in memory
    return Checkpoint(card, LOADERS[card.family](folder, dtype, device, quantized), preview_map)
