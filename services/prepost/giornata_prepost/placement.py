"""Where the parts of a checkpoint are, by the memory plan of the device, and autoencoders that work in tiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from giornata.device_claims import DeviceLedger
from giornata.memory_plan import TILE, USABLE, ModelMemory, PrepostPlan, plan_prepost
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName
from giornata_prepost.config import PrepostConfig

log = structlog.get_logger(__name__)


ON_DEVICE: Final = PrepostPlan(encoders=True, whole_pixels=sys.maxsize, size_bytes=0)
"""Of a device with room for everything."""


def planned(
    config: PrepostConfig, model: ModelMemory, card: ModelCard, ledger: DeviceLedger, device_bytes: int
) -> PrepostPlan:
    """Plan what this prepost has of a GPU, and state it in the ledger.

    Where no denoiser has stated anything, one of this checkpoint may come to this GPU.
    """
    ledger.state(model.prepost(TILE**2, encoders=False))
    others = ledger.others()
    room = USABLE * device_bytes - sum(one.size_bytes for one in others if one.gpu == ledger.gpu)
    if ledger.folder and all(one.service != ServiceName.DENOISER for one in others):
        room -= model.denoiser(card.native_size**2)
    asked = {"auto": None, "device": True, "cpu": False}[config.text_encoders]
    plan = plan_prepost(room, model, config.model_pixels, asked)
    ledger.state(plan.size_bytes)
    log.info("memory_plan", **plan._asdict(), device_bytes=device_bytes)
    return plan


@contextmanager
def in_tiles(autoencoder: Any) -> Iterator[None]:
    """Inside, larger pictures pass an autoencoder of diffusers in tiles of :data:`giornata.memory_plan.TILE` pixels."""
    if hasattr(autoencoder, "tile_latent_min_size"):
        factor = 2 ** (len(autoencoder.config.block_out_channels) - 1)
        autoencoder.tile_sample_min_size, autoencoder.tile_latent_min_size = TILE, TILE // factor
        autoencoder.enable_tiling()
    else:
        autoencoder.enable_tiling(TILE, TILE, TILE * 3 // 4, TILE * 3 // 4)
    try:
        yield
    finally:
        autoencoder.disable_tiling()
