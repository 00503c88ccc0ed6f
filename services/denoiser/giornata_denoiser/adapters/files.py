"""Files of LoRAs: fetched from the nearest place, mapped, and compared with the network's modules."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.lora_files import ANSWER_MS, TIER_NAME, WHOLE_FILES, read_pieces
from giornata.packed.low_rank import DOWN, TEXT_ENCODER, UP
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, LoraMismatch, LoraUnreadable, ServiceUnavailable
from giornata.wire.loras import StoredFile, TierLoadReply, TierLoadRequest
from giornata_denoiser.rows.row import RowLora

# Canonical files of LoRAs on this machine's disk: mapped, and compared with the network's modules.
#
# What prepost writes is described in `giornata_prepost.loras.canonical`. Its bytes have the digest that the
# job names, but the network may be another version's, and the disk may have failed since.


DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
READ_BYTES: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class LoraFile:
    """The tensors of one file that change the denoising network."""

    tensors: Mapping[str, Tensor]
    """``<path>.down`` (rank, in) and ``<path>.up`` (out, rank) of each module, of one dtype: mapped pages."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_lora(path: Path, digest: str | None, layers: Mapping[str, nn.Module]) -> LoraFile:
    """The file of this sha-256, if its modules are among the `layers` of the network, by path.

    Every byte is read once. With None for the digest none is: it was compared while the file was received.

    Raises:
        LoraUnreadable: the file is not whole, or not the one of this digest.
        LoraMismatch: a module, a shape or a dtype does not fit the network.
        OSError: it cannot be read.
    """
    if digest is not None and (found := sha256(path)) != digest:
        raise LoraUnreadable("The file of a LoRA is damaged.", received=found, accepted=digest)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if not name.startswith(TEXT_ENCODER)]  # noqa: SIM118 - not a mapping
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise LoraUnreadable(received=str(error), accepted="a whole file of safetensors") from error
    _check(tensors, layers)
    return LoraFile(tensors)


def sha256(path: Path) -> str:
    """The digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path, digest: str) -> bool:
    """Copy a file; whether there was one with this sha-256, which is compared on the way.

    Raises:
        OSError: `target` cannot be written.
    """
    total = hashlib.sha256()
    try:
        reading = source.open("rb")
    except OSError:  # none of this name, or none that this process may read
        return False
    with reading, target.open("wb") as writing:
        while piece := reading.read(READ_BYTES):
            total.update(piece)
            writing.write(piece)
    return total.hexdigest() == digest


def _check(tensors: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> None:
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise LoraMismatch("The LoRA's factors have several dtypes.", accepted="one of them")
    for name, tensor in tensors.items():
        path, _, end = name.rpartition(".")
        if f".{end}" not in {DOWN, UP} or tensor.dtype not in DTYPES:
            raise LoraMismatch(received=f"{name} {tensor.dtype}", accepted=f"*{DOWN}, *{UP} of {DTYPES}")
        down, up = tensors.get(path + DOWN), tensors.get(path + UP)
        if down is None or up is None:
            raise LoraMismatch("The LoRA has one factor of a module without the other.", received=name)
        received = tuple(down.shape), tuple(up.shape)
        wanted = _shapes(layers.get(path), len(down) if down.ndim else 0)
        if received != wanted:
            raise LoraMismatch(
                received=f"{path}: {received}", accepted="no such module" if wanted is None else str(wanted)
            )


def _shapes(module: nn.Module | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of a module's factors of this rank; None where it takes none."""
    if isinstance(module, nn.Linear):
        return (rank, module.in_features), (module.out_features, rank)
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        sides = tuple(module.kernel_size)
        return (rank, module.in_channels, *sides), (module.out_channels, rank, 1, 1)
    return None


# Files of LoRAs from the nearest place that has them: the host tier, the store's own folder, the LoRA
# store.


DIGEST: Final = re.compile(r"[0-9a-f]{64}")
"""A sha-256: no other name is looked for in a folder."""
NAME_BYTES: Final = 128

T = TypeVar("T")

log = structlog.get_logger(__name__)


def tier_in(folder: Path | None) -> str | None:
    """The name of the host tier that a store fills in `folder`; None where none has done so."""
    if folder is None:
        return None
    try:
        with (folder / TIER_NAME).open(encoding="utf-8") as file:
            return subjects.token(file.read(NAME_BYTES).strip())
    except (OSError, ValueError):
        return None


class LoraStoreFetcher:
    """Fetches files: called in threads, asking on the event loop, until it is closed there.

    Args:
        bus: asks the LoRA stores.
        limit_bytes: largest file.
        folder: the stores' own folder, where this machine has it.
        host_folder: the folder of this machine's host tier.
    """

    def __init__(
        self, bus: Bus, limit_bytes: int, folder: Path | None, host_folder: Path | None = None
    ) -> None:
        self._bus, self._limit_bytes = bus, limit_bytes
        self._folder, self._host_folder = folder, host_folder
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[Future[Any]] = set()

    def __call__(self, lora: RowLora, path: Path, *, ahead: bool) -> None:
        """Write the canonical file of `lora` to `path`; `ahead` of a job that waits for it.

        Raises:
            GiornataError: the store has none, or another.
            ServiceUnavailable: it is closed.
        """
        known = DIGEST.fullmatch(lora.digest) is not None and lora.size_bytes <= self._limit_bytes
        if known and self._from_host(lora, path, ahead=ahead):
            return
        if (
            known
            and self._folder is not None
            and copy_file(self._folder / WHOLE_FILES / lora.digest, path, lora.digest)
        ):
            return
        self._waited(self._fetched(lora, path))

    def close(self) -> None:
        """Let go of what is being fetched: threads wait for it no longer."""
        with self._lock:
            self._closed, running = True, tuple(self._running)
        for fetch in running:
            fetch.cancel()

    def _from_host(self, lora: RowLora, path: Path, *, ahead: bool) -> bool:
        """Have the file brought to the host tier, and copy it; twice where what is there is damaged."""
        folder, tier = self._host_folder, tier_in(self._host_folder)
        if folder is None or tier is None:
            return False
        for damaged in (False, True):
            try:
                self._waited(self._brought(tier, lora, ahead=ahead, damaged=damaged))
            except ServiceUnavailable:
                if self._closed:
                    raise
                return False
            except GiornataError as error:
                log.info("not_in_host_tier", lora=lora.digest, error=str(error))
                return False
            if copy_file(folder / WHOLE_FILES / lora.digest, path, lora.digest):
                return True
        return False

    def _waited(self, asking: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._closed:
                asking.close()
                raise ServiceUnavailable("This denoiser is stopping.")
            running = asyncio.run_coroutine_threadsafe(asking, self._loop)
            self._running.add(running)
        try:
            return running.result()
        finally:
            with self._lock:
                self._running.discard(running)

    async def _brought(self, tier: str, lora: RowLora, *, ahead: bool, damaged: bool) -> None:
        file = StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes)
        request = TierLoadRequest(file=file, ahead=ahead, damaged=damaged, remaining_ms=ANSWER_MS)
        await self._bus.call(subjects.bring(tier), request, TierLoadReply, Deadline.after_ms(ANSWER_MS))

    async def _fetched(self, lora: RowLora, path: Path) -> None:
        file = StoredFile(sha256=lora.digest, size_bytes=lora.size_bytes)
        written = await asyncio.to_thread(path.open, "wb")
        try:
            async for piece in read_pieces(self._bus, file, self._limit_bytes):
                await asyncio.to_thread(written.write, piece)
        finally:
            await asyncio.to_thread(written.close)
