"""Opening autoencoder and text encoders of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from giornata.checkpoints import checkpoint_folder
from giornata.device_claims import DeviceLedger
from giornata.families import Family
from giornata.gpus import host_device
from giornata.model_cards import model_memory, read_model_card
from giornata.wire.errors import Failed
from giornata.wire.workers import ServiceName
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.chroma.images import ChromaImages
from giornata_prepost.families.flux import images as flux
from giornata_prepost.families.flux2.images import Flux2Images, KleinImages, KleinKVImages
from giornata_prepost.families.protocol import ImageModel
from giornata_prepost.families.qwen_image.images import QwenImages
from giornata_prepost.families.qwen_image_21.images import Qwen21Images
from giornata_prepost.families.qwen_image_edit.images import QwenEditImages, QwenEditPlusImages
from giornata_prepost.families.sd import images as sd
from giornata_prepost.families.sd3.images import SD3Images
from giornata_prepost.families.sdxl import images as sdxl
from giornata_prepost.families.z_image.images import ZImageImages
from giornata_prepost.placement import ON_DEVICE, planned

FAMILIES: Final[dict[str, Callable[..., ImageModel]]] = {
    Family.FLUX_INPAINT: flux.InpaintImages,
    Family.FLUX_KONTEXT: flux.KontextImages,
    Family.FLUX_FILL: flux.FillImages,
    Family.SD: sd.PlainImages,
    Family.SD_INPAINT: sd.InpaintImages,
    Family.SDXL: sdxl.PlainImages,
    Family.SDXL_INPAINT: sdxl.InpaintImages,
    Family.SD3: SD3Images,
    Family.Z_IMAGE: ZImageImages,
    Family.FLUX2: Flux2Images,
    Family.FLUX2_KLEIN: KleinImages,
    Family.FLUX2_KLEIN_KV: KleinKVImages,
    Family.QWEN_IMAGE: QwenImages,
    Family.QWEN_IMAGE_EDIT: QwenEditImages,
    Family.QWEN_IMAGE_EDIT_PLUS: QwenEditPlusImages,
    Family.QWEN_IMAGE_21: Qwen21Images,
    Family.CHROMA: ChromaImages,
}
"""Loads a folder to a device, with weights and results of a dtype, by :attr:`ModelCard.family`."""


def open_model(config: PrepostConfig) -> ImageModel:
    """Load autoencoder and text encoders of the configured checkpoint; a hub id is downloaded first.

    Raises:
        Failed: there is no such checkpoint, or its family is not served.
    """
    try:
        folder = checkpoint_folder(config.model)
        card = read_model_card(folder, config.served_name)
        device, plan = config.torch_device(), ON_DEVICE
        if device.type == "cuda":
            ledger = DeviceLedger(config.device_ledger, host_device(device).id, ServiceName.PREPOST)
            device_bytes = torch.cuda.mem_get_info(device)[1]
            plan = planned(config, model_memory(folder), card, ledger, device_bytes)
        return FAMILIES[card.family](folder, card, device, config.torch_dtype(), plan)
    except (ValueError, OSError) as error:
        raise Failed(f"The model {config.model} cannot be loaded: {error}") from error
