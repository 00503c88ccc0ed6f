"""What a record keeps of how late its LoRA may join. Pure."""

from __future__ import annotations

from giornata.wire.errors import InvalidField, LoraMismatch
from giornata.wire.loras import LoraRecord, ProfiledLora


def check_share(share: float) -> None:
    """Raise InvalidField unless `share` is a part of the steps, and not all of them."""
    if not 0 <= share < 1:
        raise InvalidField(field="joins_within", received=share, accepted="0 to below 1")


def with_share(record: LoraRecord, told: ProfiledLora) -> LoraRecord:
    """`record` with what was `told`; LoraMismatch where pictures of another file or checkpoint were compared."""
    canonical = record.canonical
    if canonical is None or (canonical.file.sha256, canonical.model_digest) != (
        told.sha256,
        told.model_digest,
    ):
        raise LoraMismatch(
            f"The LoRA {record.lora_id} is another file, or for another checkpoint, than the one that was profiled.",
            received=f"file {told.sha256[:12]}, checkpoint {told.model_digest[:12]}",
            accepted="none: it is not ready"
            if canonical is None
            else f"file {canonical.file.sha256[:12]}, checkpoint {canonical.model_digest[:12]}",
        )
    return record.model_copy(update={"joins_within": told.joins_within})
