"""LoRAs: their records, the questions to the LoRA store, and its host tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

from giornata.wire.errors import ErrorBody
from giornata.wire.values import RecordModel, WireModel, digest_of

# LoRAs: their records, and the questions to the LoRA store and to prepost.
#
# A LoRA is a file of low-rank factors for the modules of one model. Its file as it was sent is the
# *source*; prepost makes one *canonical* file of it. Both are named by their sha-256. A record lies in
# JetStream's key-value store under its tenant's name, and only the LoRA store writes it. Its times are Unix
# times, since it outlives processes.


EVERYONE: Final = "=everyone"
"""Stands for the tenant of LoRAs that an operator's folder shares with all; no tenant can have this name."""
LORA_FILE_BYTES: Final = 2 << 30
"""Largest file of a LoRA."""
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
        """Return whether nothing more happens to the LoRA by itself."""
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
    """The canonical file that prepost made of a source."""

    file: StoredFile
    model_digest: str
    """Digest of the checkpoint whose modules it was checked against."""
    rank: int
    modules: int
    """Modules of the denoising network that it changes."""
    text_modules: int = 0
    weights: int = 0
    """Weights in the factors of the denoising network's modules."""


class LoraRecord(RecordModel):
    """The truth about a LoRA, or about an upload."""

    lora_id: str
    tenant: str
    created_s: int
    state: LoraState
    model: str | None = None
    name: str | None = None
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


# The host tier of a LoRA store: what it holds, as snapshots and numbered changes, and what it is asked.
#
# A host tier is a folder of canonical files on the fast disk, or in the memory, of one machine. Its store
# fills it, and the denoisers of the machine read it. Every file that comes or goes is a change with a
# number of its own.


DIGEST_BYTES: Final = 32
"""Bytes of a sha-256."""
TOLD_CHANGES: Final = 256
"""Most changes of one telemetry; a listener that lacks others asks for a snapshot."""
MOST_FILES: Final = 20_000
"""Files of a snapshot, the last used first."""
MOST_WANTED: Final = 6_000
"""Files of a wanted set, the most wanted first."""


class TierChange(WireModel):
    """A file that came or went."""

    number: int
    """One more than that of the change before, from 1 on."""
    sha256: str
    size_bytes: int | None = None
    """None: it went."""


class TierLoads(WireModel):
    """Loads into a tier since its start, by their reason."""

    demand: int = 0
    """A job waited."""
    ahead: int = 0
    """A job was about to come."""
    plan: int = 0
    """The plan, or the catalogue's pins, wanted it."""
    waited_ms: float = 0.0
    """Time that loads on demand and ahead took together."""


class HostTier(WireModel):
    """Telemetry of a host tier."""

    name: str
    """Name of the tier, stable over restarts; denoisers that read it tell the same."""
    epoch: int
    """Epoch of this process's tier: microseconds of Unix time at its start. Each epoch has its own numbers."""
    number: int
    """Number of the latest change; 0 before the first."""
    changes: tuple[TierChange, ...] = ()
    """Since the last telemetry, at most :data:`TOLD_CHANGES`, the latest last."""
    budget_bytes: int
    used_bytes: int
    bytes_per_s: float = 0.0
    """Bandwidth of its loads, as measured; 0 before the first."""
    hits: int = 0
    loads: TierLoads = TierLoads()
    evicted: int = 0
    failed: int = 0
    plans: int = 0
    """Wanted sets that were taken up."""
    plans_ignored: int = 0
    """Wanted sets that were older than one before, or unreadable."""
    wanted: int = 0
    """Files that the plan and the catalogue's pins want here."""
    missing: int = 0
    """Wanted files that are not here yet."""


class TierSnapshotRequest(WireModel):
    """router → LoRA store: what does your host tier hold? Answered by a :class:`TierSnapshot`."""

    remaining_ms: int


class TierSnapshot(WireModel):
    """The contents of a host tier after its change `number`."""

    name: str
    epoch: int
    number: int
    sha256s: bytes
    """Digests of its files, :data:`DIGEST_BYTES` each; at most :data:`MOST_FILES`, the last used first."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str, epoch: int, number: int, held: Iterable[tuple[str, int]]) -> TierSnapshot:
        """A snapshot of digests and sizes."""
        listed = tuple(held)
        return cls(
            name=name,
            epoch=epoch,
            number=number,
            sha256s=packed(sha256 for sha256, _ in listed),
            sizes=tuple(size_bytes for _, size_bytes in listed),
        )

    @property
    def held(self) -> dict[str, int]:
        """Bytes by digest."""
        return dict(zip(unpacked(self.sha256s), self.sizes, strict=False))


class TierLoadRequest(WireModel):
    """denoiser → LoRA store: have a file in your host tier. Answered, once it is there, by :class:`TierLoadReply`."""

    file: StoredFile
    ahead: bool = False
    """No job waits for it yet."""
    damaged: bool = False
    """What is there was read, and is not this file."""
    remaining_ms: int


class TierLoadReply(WireModel):
    """LoRA store → denoiser: the file is in the tier's folder, under its digest."""

    loaded: bool
    """Whether it had to be copied from the store's folder."""


class WantedFiles(WireModel):
    """active router → stores, in the bucket of wanted sets: what a host tier should hold."""

    epoch: tuple[int, int]
    """Epoch of the router's lease."""
    number: int
    """Number of this router's plan; a later one replaces an earlier one."""
    sha256s: bytes
    """Digests of the files, :data:`DIGEST_BYTES` each, the most wanted first; at most :data:`MOST_WANTED`."""

    @property
    def revision(self) -> tuple[tuple[int, int], int]:
        """Grows with every plan."""
        return self.epoch, self.number

    @property
    def digests(self) -> tuple[str, ...]:
        """The files, the most wanted first."""
        return tuple(unpacked(self.sha256s))


def packed(sha256s: Iterable[str]) -> bytes:
    """Digests in hexadecimal as bytes, one after the other; ValueError for another text."""
    return b"".join(map(bytes.fromhex, sha256s))


def unpacked(sha256s: bytes) -> Iterator[str]:
    """The digests of :func:`packed`, in hexadecimal; a part of one at the end is left out."""
    for first in range(0, len(sha256s) - DIGEST_BYTES + 1, DIGEST_BYTES):
        yield sha256s[first : first + DIGEST_BYTES].hex()
