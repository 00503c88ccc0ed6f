"""What a job keeps of the LoRAs that its request names. Pure."""

from __future__ import annotations

from typing import Final

from giornata.wire.adapters import AskedLora, LoraUse, LoraWait
from giornata.wire.errors import LoraMismatch, LoraNotReady
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard

FIELD: Final = "loras"
PROFILED_SCALE: Final = 1.0
"""At which pictures are compared. A LoRA that acts more strongly may change more, and is waited for."""


def use_of(
    asked: AskedLora, record: LoraRecord, card: ModelCard, wait: LoraWait, join: float | None = None
) -> LoraUse:
    """The LoRA of `record`, as it is now, for a job of the model `card` whose rows wait for it as `wait` says.

    `join` is the share of the steps after which the request has it join, if it says so.

    Raises:
        LoraNotReady: it is still being made, or could not be.
        LoraMismatch: it is for another model, or for another checkpoint of this name.
    """
    canonical = record.canonical
    if record.state is not LoraState.READY or canonical is None:
        raise _not_ready(record)
    if record.model != card.name:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} is for the model {record.model}, and the request for {card.name}.",
            field=FIELD,
            received=f"a LoRA for {record.model}",
            accepted=f"a LoRA for {card.name}, or model={record.model}",
        )
    if canonical.model_digest != card.digest:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} was checked against another checkpoint of {card.name} than is served.",
            field=FIELD,
            received=f"checkpoint {canonical.model_digest[:12]}",
            accepted=f"checkpoint {card.digest[:12]}: delete the LoRA and upload it again",
        )
    return LoraUse(
        lora_id=record.lora_id,
        sha256=canonical.file.sha256,
        size_bytes=canonical.file.size_bytes,
        rank=canonical.rank,
        modules=canonical.modules,
        text_modules=canonical.text_modules,
        weights=canonical.weights,
        scale=asked.scale,
        joins_within=join or _allowed(record, wait, asked.scale),
    )


def _allowed(record: LoraRecord, wait: LoraWait, scale: float) -> float:
    return (record.joins_within or 0.0) if wait is LoraWait.BOUNDED and 0 <= scale <= PROFILED_SCALE else 0.0


def _not_ready(record: LoraRecord) -> LoraNotReady:
    if record.error is not None:
        return LoraNotReady(
            f"The LoRA {record.lora_id} could not be used: {record.error.message}",
            field=FIELD,
            received=f"{record.state} ({record.error.code})",
            accepted="a LoRA that is ready",
        )
    return LoraNotReady(
        f"The LoRA {record.lora_id} is not ready yet.",
        field=FIELD,
        received=str(record.state),
        accepted=f"a LoRA that is ready; GET /v1/loras/{record.lora_id} tells",
    )
