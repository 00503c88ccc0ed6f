"""The process in which LoRAs are read, and prepost's answer to `adapter`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from giornata.bus.bus import Bus
from giornata.checkpoints import checkpoint_folder
from giornata.lora_files import fetch, open_upload
from giornata.scratch import scratch_folder
from giornata.wire.errors import GiornataError, LoraTooLarge, LoraUnreadable, MalformedMessage
from giornata.wire.loras import PIECE_BYTES, CanonicalLora, LoraRecord, NormaliseLora, StoredFile
from giornata.wire.models import ModelCard
from giornata_prepost.config import PrepostConfig
from giornata_prepost.worker_pools import WorkPool

if TYPE_CHECKING:
    from giornata_prepost.loras.normalisation import CanonicalLoraSummary


# The process in which LoRAs are read. It starts with the first one, and only it loads torch.


class LoraPool(WorkPool):
    """One process. A LoRA that keeps it busy for too long, or ends it, is refused."""

    def __init__(self) -> None:
        super().__init__(1)

    def late(self, limit_s: float) -> GiornataError:
        """The file costs too much."""
        return LoraTooLarge("Reading the LoRA takes too long.", received=f"more than {limit_s:g} s")

    def deadly(self) -> GiornataError:
        """The file's bytes crash what reads them."""
        return LoraUnreadable("Reading the LoRA ends the process that does it.")


def normalise_in_pool(
    source: Path, target: Path, folder: Path, told: Mapping[str, str]
) -> CanonicalLoraSummary:
    """As :func:`giornata_prepost.loras.normalisation.normalise`."""
    from giornata_prepost.loras.normalisation import normalise  # noqa: PLC0415 - imports torch and diffusers

    return normalise(source, target, folder, told)


# Prepost's answer to `adapter`: the source comes from the LoRA store, the canonical file goes there.


log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LoraNormaliser:
    """LoRAs for the checkpoint of a configuration, one at a time."""

    bus: Bus
    pool: LoraPool
    card: ModelCard
    config: PrepostConfig
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, request: NormaliseLora) -> CanonicalLora:
        """Make the canonical file of a LoRA; raises why there is none."""
        lora = request.lora
        if lora.source is None or lora.model != self.card.name:
            raise MalformedMessage(received=lora.model, accepted=f"a whole LoRA for {self.card.name}")
        async with self._turn:
            with scratch_folder() as folder:
                return await self._made(lora, lora.source, folder)

    async def _made(self, lora: LoraRecord, source: StoredFile, folder: Path) -> CanonicalLora:
        read, written = folder / "source", folder / "canonical"
        await fetch(self.bus, source, read, self.config.lora_file_bytes)
        checkpoint = await asyncio.to_thread(checkpoint_folder, self.config.model)
        told = {"model": self.card.name, "model_digest": self.card.digest, "source_sha256": source.sha256}
        made, compute_ms = await self.pool.timed(
            normalise_in_pool, read, written, checkpoint, told, limit_s=self.config.lora_timeout_s
        )
        async with open_upload(self.bus) as upload:
            with written.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                    await upload.write(data)
            kept = await upload.keep()
        log.info("lora_normalised", lora=lora.lora_id, modules=made.modules, compute_ms=round(compute_ms))
        return CanonicalLora(
            file=kept,
            model_digest=self.card.digest,
            rank=made.rank,
            modules=made.modules,
            text_modules=made.text_modules,
            weights=made.weights,
        )
