"""Opening autoencoder and text encoders of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.families import Family, when_called
from giornata.gpus import DeviceLedger, host_device
from giornata.model_cards import (
    TILE,
    USABLE,
    ModelMemory,
    PrepostPlan,
    model_memory,
    plan_prepost,
    read_model_card,
)
from giornata.wire.errors import Failed
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName
from giornata_prepost.config import PrepostConfig

if TYPE_CHECKING:
    from giornata_prepost.families.pipeline import ImageModel

FAMILIES: Final[dict[str, Callable[..., ImageModel]]] = {
    family: when_called(f"giornata_prepost.families.{name}")
    for family, name in {
        Family.FLUX_INPAINT: "flow_transformers:FluxInpaintImages",
        Family.FLUX_KONTEXT: "flow_transformers:FluxKontextImages",
        Family.FLUX_FILL: "flow_transformers:FluxFillImages",
        Family.SD: "unets:SDImages",
        Family.SD_INPAINT: "unets:SDInpaintImages",
        Family.SDXL: "unets:SDXLImages",
        Family.SDXL_INPAINT: "unets:SDXLInpaintImages",
        Family.SD3: "flow_transformers:SD3Images",
        Family.Z_IMAGE: "flow_transformers:ZImageImages",
        Family.FLUX2: "flow_transformers:Flux2Images",
        Family.FLUX2_KLEIN: "flow_transformers:KleinImages",
        Family.FLUX2_KLEIN_KV: "flow_transformers:KleinKVImages",
        Family.QWEN_IMAGE: "flow_transformers:QwenImages",
        Family.QWEN_IMAGE_EDIT: "flow_transformers:QwenEditImages",
        Family.QWEN_IMAGE_EDIT_PLUS: "flow_transformers:QwenEditPlusImages",
        Family.QWEN_IMAGE_21: "flow_transformers:Qwen21Images",
        Family.CHROMA: "flow_transformers:ChromaImages",
    }.items()
}
"""Loads a folder to a device, with weights and results of a dtype, by the card's family; no other is imported."""


def open_model(config: PrepostConfig) -> ImageModel:
    """Load autoencoder and text encoders of the configured checkpoint; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or its family is not served.
    """
    try:
        folder = checkpoint_folder(config.model)
        card = read_model_card(folder, config.served_name)
        device, dtype = config.torch_device(), config.torch_dtype()
        if device.type != "cuda":
            return FAMILIES[card.family](folder, card, device, dtype)
        ledger = DeviceLedger(config.device_ledger, host_device(device).id, ServiceName.PREPOST)
        model, device_bytes = model_memory(folder, dtype.itemsize), torch.cuda.mem_get_info(device)[1]
        ledger.state(model.prepost(TILE**2, encoders=False))
        plan: Callable[[], PrepostPlan] = partial(plan_memory, config, model, card, ledger, device_bytes)
        if config.text_encoders != "auto":
            plan = cache(plan)  # no room that others leave changes it
        return FAMILIES[card.family](folder, card, device, dtype, plan)
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error


def plan_memory(
    config: PrepostConfig, model: ModelMemory, card: ModelCard, ledger: DeviceLedger, device_bytes: int
) -> PrepostPlan:
    """Plan what this prepost has of a GPU, and state it in the ledger.

    Where no denoiser has stated anything, one of this checkpoint may come to this GPU.
    """
    others = ledger.others()
    room = USABLE * device_bytes - sum(one.size_bytes for one in others if one.gpu == ledger.gpu)
    if ledger.folder and all(one.service != ServiceName.DENOISER for one in others):
        room -= model.denoiser(card.native_size**2)
    asked = {"auto": None, "device": True, "cpu": False}[config.text_encoders]
    plan = plan_prepost(room, model, config.model_pixels, asked)
    ledger.state(plan.size_bytes)
    return plan
