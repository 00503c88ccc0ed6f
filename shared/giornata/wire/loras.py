"""LoRAs: their records, and the questions to the LoRA store and to prepost.

A LoRA is a file of low-rank factors for the modules of one model. Its file as it was sent is the *source*; prepost
makes one *canonical* file of it. Both are named by their sha-256. A record lies in JetStream's key-value store under
its tenant's name, and only the LoRA store writes it. Its times are Unix times, since it outlives processes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from giornata.wire.errors import ErrorBody
from giornata.wire.templates import digest_of
from giornata.wire.values import RecordModel, WireModel

EVERYONE: Final = "=everyone"
"""Stands for the tenant of LoRAs that an operator's folder shares with all; no tenant can have this name."""
PIECE_BYTES: Final = 1 << 20
"""Most bytes of a file in one message. Pieces are acknowledged one by one."""
MESSAGE_BYTES: Final = PIECE_BYTES + 4096
"""Most bytes of a message with a piece."""


class LoraState(StrEnum):
    """The progress of a LoRA."""

    UPLOADING = "uploading"
    """Pieces of the source arrive. The record has the upload's id."""
    VALIDATING = "validating"
    """The source is whole. It is checked, and prepost makes the canonical file."""
    READY = "ready"
    FAILED = "failed"

    @property
    def settled(self) -> bool:
        """Whether nothing more happens to the LoRA by itself."""
        return self in {LoraState.READY, LoraState.FAILED}


class LoraStyle(StrEnum):
    """Whose names the tensors of a source have."""

    DIFFUSERS = "diffusers"
    PEFT = "peft"
    KOHYA = "kohya"
    XLABS = "xlabs"
    ORIGINAL = "original"
    """Modules are named as in the original checkpoint (`diffusion_model.…`), which ComfyUI and ai-toolkit write."""


class StoredFile(RecordModel):
    """A file in the LoRA store."""

    sha256: str
    size_bytes: int


class CanonicalLora(RecordModel):
    """What prepost made of a source."""

    file: StoredFile
    model_digest: str
    """Digest of the checkpoint whose modules it was checked against."""
    rank: int
    """The largest of any module."""
    modules: int
    """Modules of the denoising network that it changes."""
    text_modules: int = 0
    """Modules of text encoders that it changes."""
    weights: int = 0
    """Weights in the factors of the denoising network's modules; 0: made by a version that did not count them."""


class LoraRecord(RecordModel):
    """The truth about a LoRA, or about an upload."""

    lora_id: str
    tenant: str
    created_s: int
    state: LoraState
    model: str | None = None
    """None while it is uploaded."""
    name: str | None = None
    """What its owner calls it."""
    received_bytes: int = 0
    """Acknowledged bytes of an upload, as told every few seconds."""
    source: StoredFile | None = None
    style: LoraStyle | None = None
    rank: int | None = None
    """The largest of any module in the source."""
    canonical: CanonicalLora | None = None
    joins_within: float | None = None
    """The largest share of the steps without it after which pictures are still alike, 0 where there is none; None:
    nothing was compared yet. Belongs to `canonical`: to its file, and to the checkpoint that it names."""
    error: ErrorBody | None = None
    worker: str | None = None
    """The LoRA store that validates it, or did so last."""
    worked_s: int = 0
    """When an instance last said that it works on the upload or the validation."""
    pinned: bool = False
    """Whether every host keeps its canonical file."""
    shared_path: str | None = None
    """Path in the shared folder; None for a LoRA that was uploaded."""


class LoraCounters(WireModel):
    """Telemetry of a LoRA store."""

    stored_bytes: int
    """Bytes of all files, as counted lately."""
    limit_bytes: int
    uploads: int = 0
    """Uploads in which a piece came here since the start, and finished ones."""
    finished: int = 0
    validating: int = 0
    """LoRAs that wait for prepost, or are with it, and files of the shared folder that were not read yet."""
    ready: int = 0
    failed: int = 0
    """Validations that ended here since the start."""
    read_bytes: int = 0
    """Bytes given out since the start."""


def lora_id(tenant: str, model: str, sha256: str) -> str:
    """The id of a LoRA: the same for the same file and model."""
    return f"lora_{digest_of(tenant, model, sha256)}"


class BeginUpload(WireModel):
    """gateway or prepost → LoRA store: a file comes in pieces. Idempotent on the id, which the sender draws."""

    upload_id: str
    tenant: str | None = None
    """Whose LoRA it becomes. None: prepost keeps a canonical file, and there is no record."""
    remaining_ms: int


class UploadChunk(WireModel):
    """The bytes of an upload from `offset` on, at most :data:`PIECE_BYTES`. The same piece may come again."""

    upload_id: str
    tenant: str | None = None
    offset: int
    data: bytes
    remaining_ms: int


class UploadProgress(WireModel):
    """LoRA store → sender: so many bytes, from the first one on, are kept whatever process ends."""

    size_bytes: int
    limit_bytes: int
    """Most bytes of the whole file."""


class FinishUpload(WireModel):
    """gateway → LoRA store: the upload is whole, and becomes a LoRA of a model. Answered by its :class:`LoraRecord`."""

    upload_id: str
    tenant: str
    model: str
    name: str | None = None
    file: StoredFile
    remaining_ms: int


class KeepUpload(WireModel):
    """prepost → LoRA store: the upload is whole, and is kept by its digest. Answered by the :class:`StoredFile`."""

    upload_id: str
    file: StoredFile
    remaining_ms: int


class DropUpload(WireModel):
    """gateway or prepost → LoRA store: the upload will not go on. Answered by what was :class:`UploadProgress`."""

    upload_id: str
    tenant: str | None = None
    remaining_ms: int


class ReadFile(WireModel):
    """prepost → LoRA store: the bytes of a file from `offset` on. Answered by a :class:`FileChunk`."""

    sha256: str
    offset: int
    size_bytes: int
    remaining_ms: int


class FileChunk(WireModel):
    """Bytes of a file; fewer than asked for at its end."""

    data: bytes


class RemoveLora(WireModel):
    """gateway → LoRA store: forget a LoRA. Answered by its last :class:`LoraRecord`."""

    lora_id: str
    tenant: str
    remaining_ms: int


class ProfiledLora(WireModel):
    """profiler → LoRA store: so late may a LoRA join. Answered by its :class:`LoraRecord`."""

    lora_id: str
    tenant: str
    sha256: str
    """sha-256 of the canonical file whose pictures were compared."""
    model_digest: str
    """Digest of the checkpoint that made those pictures."""
    joins_within: float
    """As :attr:`LoraRecord.joins_within`."""
    remaining_ms: int


class PinLora(WireModel):
    """gateway → LoRA store: keep a LoRA on every host, or no longer. Answered by its :class:`LoraRecord`."""

    lora_id: str
    tenant: str
    pinned: bool
    remaining_ms: int


class NormaliseLora(WireModel):
    """LoRA store → prepost: make the canonical file of a source. Answered by :class:`CanonicalLora`."""

    lora: LoraRecord
    remaining_ms: int
