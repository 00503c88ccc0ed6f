"""Canonical files of LoRAs, the text parts among them, and prepost's exchange of both with the LoRA store."""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import structlog
import torch
from safetensors import SafetensorError, safe_open

from giornata.bus.bus import Bus
from giornata.checkpoints import checkpoint_folder
from giornata.lora_files import fetch, open_upload
from giornata.residency.tiers import FolderTier
from giornata.scratch import scratch_folder
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import LoraMismatch, LoraUnreadable, MalformedMessage
from giornata.wire.loras import PIECE_BYTES, CanonicalLora, LoraRecord, NormaliseLora, StoredFile
from giornata.wire.models import ModelCard
from giornata_prepost.config import PrepostConfig
from giornata_prepost.encoding import TextFactors, TextLora
from giornata_prepost.worker_pools import LoraPool

if TYPE_CHECKING:
    from giornata_prepost.loras.normalisation import CanonicalLoraSummary

# Canonical files: safetensors whose tensors lie in the order of the network's blocks.
#
# Two tensors a module, ``<path>.down`` (rank, in) and ``<path>.up`` (out, rank), with a convolution's sides
# after them; alpha and rank are folded into the latter, so that the change of the weight is ``up @ down``.
# Text encoders' paths begin with the encoder's name. All have one dtype. The library sorts tensors by name,
# which is not the order of blocks.


FORM: Final = "giornata-lora-1"
"""Value of the metadata's `form`."""
NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""As safetensors calls them."""
ALIGNED_BYTES: Final = 8
DOWN, UP = ".down", ".up"
TEXT_ENCODERS: Final = "text_encoders"
"""Metadata key whose value names the text encoders with modules in the file, separated by commas."""


def write_canonical(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors`, of one dtype, in their order; the same values make the same bytes."""
    header: dict[str, object] = {"__metadata__": {"form": FORM, **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), sort_keys=False).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def read_text_part(path: Path) -> dict[str, dict[str, TextFactors]]:
    """Factors by module, by text encoder, of a canonical file: in its dtype, empty where it has none.

    Raises:
        LoraUnreadable: it is no canonical file, or not whole.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            encoders = [name for name in told.get(TEXT_ENCODERS, "").split(",") if name]
            texts = [name for name in file.keys() if name.partition(".")[0] in encoders]  # noqa: SIM118 - it is no dictionary
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in texts}
    except SafetensorError as error:
        raise LoraUnreadable(received=str(error), accepted="a whole file of safetensors") from error
    if told.get("form") != FORM:
        raise LoraUnreadable(received=f"form {told.get('form')}", accepted=f"a file of form {FORM}")
    found: dict[str, dict[str, TextFactors]] = {name: {} for name in encoders}
    for name, tensor in tensors.items():
        encoder, _, path_of = name.removesuffix(DOWN).partition(".")
        if name.endswith(DOWN):
            found[encoder][path_of] = TextFactors(tensor, tensors[name.removesuffix(DOWN) + UP])
    return found


def write_text_part(path: Path, target: Path) -> int:
    """Write the text part of a canonical file as a canonical file of its own; the number of its modules.

    Raises:
        LoraUnreadable: as :func:`read_text_part`.
    """
    found = read_text_part(path)
    named = {
        f"{encoder}.{module}.{side}": factor
        for encoder, modules in found.items()
        for module, factors in modules.items()
        for side, factor in factors._asdict().items()
    }
    write_canonical(target, named, {TEXT_ENCODERS: ",".join(found)})
    return len(named) // 2


# Text parts of LoRAs: fetched from the LoRA store, and kept on disk by the digest of their canonical file.
#
# Of a canonical file, which may have hundreds of megabytes, the text part alone is kept.


SUFFIX: Final = ".text.safetensors"
FETCHES: Final = 2
"""Files that are fetched at the same time; each lies on disk as a whole until it is read."""

log = structlog.get_logger(__name__)


class TextLoraCache:
    """A cache of one instance, in `folder`, which is its own: at most `kept_bytes`, the least recently used go first.

    Used from one event loop.
    """

    def __init__(self, bus: Bus, folder: Path, *, file_bytes: int, kept_bytes: int) -> None:
        self._bus, self._file_bytes = bus, file_bytes
        self._parts = FolderTier(folder, kept_bytes, SUFFIX)
        """By the digest of the whole file."""
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(FETCHES)

    async def of(self, loras: Sequence[LoraUse]) -> tuple[TextLora, ...]:
        """The text parts of a job's LoRAs, in their order; of those that have one and a scale.

        Raises:
            LoraNotFound: the store does not have the file.
            LoraUnreadable: its bytes are not those of its digest, or no canonical file.
            LoraMismatch: it has no text part, against its record.
            LoraTooLarge: it is larger than this instance reads.
            ServiceUnavailable, DeadlineExceeded: the store is away.
        """
        return tuple([await self._one(use) for use in loras if use.text_modules and use.scale])

    async def _one(self, use: LoraUse) -> TextLora:
        with self._parts.pinned(use.sha256):
            lock = self._fetching.setdefault(use.sha256, asyncio.Lock())
            async with lock:  # who waits here finds the file
                if not self._parts.use(use.sha256):
                    await self._fetch(use)
            return TextLora(use.scale, await asyncio.to_thread(read_text_part, self._parts.path(use.sha256)))

    async def _fetch(self, use: LoraUse) -> None:
        file = StoredFile(sha256=use.sha256, size_bytes=use.size_bytes)
        async with self._turns:
            with (
                self._parts.writing(use.sha256) as part,
                tempfile.TemporaryDirectory(dir=self._parts.folder) as folder,
            ):
                whole = Path(folder) / "whole"
                await fetch(self._bus, file, whole, self._file_bytes)
                if not await asyncio.to_thread(write_text_part, whole, part):
                    raise LoraMismatch(
                        "The LoRA has no text part.",
                        received=f"{use.lora_id}, of {use.sha256}",
                        accepted=f"{use.text_modules} modules of text encoders, as its record says",
                    )
        log.info("lora_text_fetched", lora=use.lora_id, size_bytes=self._parts.size_of(use.sha256))


# Prepost's answer to `adapter`: the source comes from the LoRA store, the canonical file goes there.


def normalise_in_pool(
    source: Path, target: Path, folder: Path, told: Mapping[str, str]
) -> CanonicalLoraSummary:
    """As :func:`giornata_prepost.loras.normalisation.normalise`."""
    from giornata_prepost.loras.normalisation import normalise  # noqa: PLC0415 - imports torch and diffusers

    return normalise(source, target, folder, told)


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
