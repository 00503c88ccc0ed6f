"""LoRAs of the denoiser's rows: files from the LoRA store, their pages in memory, and sets of them on the device."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.lora_files import ANSWER_MS, TIER_NAME, WHOLE_FILES, read_pieces
from giornata.packed.low_rank import DOWN, TEXT_ENCODER, UP, SequenceLoras, low_rank
from giornata.residency.tiers import FolderTier, LoadedTier
from giornata.scratch import scratch_folder
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, LoraMismatch, LoraUnreadable, ServiceUnavailable
from giornata.wire.loras import StoredFile, TierLoadReply, TierLoadRequest
from giornata.wire.workers import AdapterCounters, AdapterLoad, Tier
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.network import Network
from giornata_denoiser.rows.parts import RowLora, lora_set_name
from giornata_denoiser.rows.row import Row

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
READ_BYTES: Final = 1 << 22


Factors = Mapping[str, Tensor]
"""The tensors of one file that change the network: ``<path>.down`` (rank, in) and ``<path>.up`` (out, rank) of
each module, of one dtype."""


def open_lora(path: Path, digest: str | None, layers: Mapping[str, nn.Module]) -> Factors:
    """The mapped pages of the file of this sha-256, if its modules are among the `layers` of the network, by path.

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
    return tensors


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

    def __call__(self, lora: RowLora, path: Path, ahead: bool) -> None:  # noqa: FBT001 - a `Fetch`
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


SUFFIX: Final = ".lora.safetensors"
LISTED: Final = 256
"""Digests of each tier that telemetry lists."""


Fetch = Callable[[RowLora, Path, bool], None]
"""Writes a LoRA's canonical file to a path, having compared its digest; ahead of a row that waits for it, or not.

Waits; raises a GiornataError where the LoRA store has none, or other bytes.
"""
Make = Callable[[str, Sequence[tuple[Mapping[str, Tensor], float]]], SequenceLoras]
"""Makes the set of this name of its LoRAs' tensors, on the device and in the network's dtype, and scales."""


class LoraTierCapacities(NamedTuple):
    """Most bytes of what is not pinned, by tier."""

    disk: int
    memory: int
    device: int


class LoraTiers:
    """LoRAs by digest in a folder and in memory, and sets of them on the device of the network.

    Args:
        fetch: brings a file that is not in the folder.
        make: makes sets.
        layers: what LoRAs may change, by path; the device and dtype of their weights are those of sets. Those of an
            outline have sets in host memory.
        folder: its files are taken over, oldest use first.
        loads: how many loads run at a time.
        told: is called, in any thread, with each hop of a LoRA that has ended.
    """

    def __init__(
        self,
        fetch: Fetch,
        make: Make,
        layers: Mapping[str, nn.Module],
        folder: Path,
        budgets: LoraTierCapacities,
        *,
        loads: int = 2,
        told: Callable[[AdapterLoad], None] = lambda _: None,
    ) -> None:
        self._told = told
        self._fetch, self._make, self._layers = fetch, make, layers
        some = next(parameter for layer in layers.values() for parameter in layer.parameters())
        self._device, self._dtype = torch.device("cpu") if some.is_meta else some.device, some.dtype
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's is not typed
        self._files: LoadedTier[Factors] = LoadedTier(
            budgets.memory, lambda file: sum(tensor.nbytes for tensor in file.values())
        )
        self._sets: LoadedTier[SequenceLoras] = LoadedTier(budgets.device, lambda made: made.size_bytes)
        self._lock = threading.Lock()
        self._memory_bytes, self._waited_s = budgets.memory, 0.0
        self._disk = FolderTier(folder, budgets.disk, SUFFIX)
        self._members: dict[str, tuple[RowLora, ...]] = {}
        """The LoRAs of every set that was asked for."""
        self._counters: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(loads, thread_name_prefix="lora")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for loads that have begun; those that have not are cancelled."""
        self._threads.shutdown(cancel_futures=True)

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """The set of these LoRAs on the device; the same object while it stays. None while it is not loaded."""
        return self._sets.get(lora_set_name(loras))

    @contextmanager
    def held(self, loras: tuple[RowLora, ...]) -> Iterator[Future[SequenceLoras]]:
        """The set of these LoRAs, which is loaded at once and stays within the context.

        The future has the load's error where it fails. A load that has not begun when the context ends is let go.
        """
        name = lora_set_name(loras)
        with ExitStack() as pins:
            pins.enter_context(self._sets.pinned(name))
            for lora in loras:
                pins.enter_context(self._files.pinned(lora.digest))
            loading = self._threads.submit(self._loaded, loras)
            try:
                yield loading
            finally:
                loading.cancel()

    def prefetch(self, loras: tuple[RowLora, ...]) -> None:
        """Bring a set onto the device: an edit with it is about to come. A failure is logged; the edit tries again.

        Its files come into memory alone where pinned sets leave the device no room.
        """
        if loras:
            self._threads.submit(self._prefetched, loras)

    def counted(self) -> AdapterCounters:
        """The counters and sizes, as telemetry tells them."""
        with self._lock:
            found = dict(self._counters)
        sizes = {
            "disk_bytes": self._disk.size_bytes,
            "device_bytes": self._sets.size_bytes,
            "memory_bytes": self._files.size_bytes,
            "memory_limit_bytes": self._memory_bytes,
            "waited_ms": self._waited_s * 1e3,
        }
        gone = {
            "evicted_device": self._sets.evicted,
            "evicted_memory": self._files.evicted,
            "evicted_disk": self._disk.evicted,
        }
        return AdapterCounters.model_validate({**found, **sizes, **gone})

    def pinned(self) -> frozenset[str]:
        """LoRAs and sets that stay in some tier: rows have them, or they are being loaded."""
        return self._sets.pins | self._files.pins | self._disk.pins

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Digests of LoRAs that are here, the last used first, at most :data:`LISTED` a tier."""
        sets = [lora.digest for name in reversed(tuple(self._sets)) for lora in self._members[name]]
        memory, disk = reversed(tuple(self._files)), reversed(tuple(self._disk))
        tiers = {Tier.DEVICE: sets, Tier.MEMORY: memory, Tier.DISK: disk}
        listed = {tier: tuple(islice(dict.fromkeys(names), LISTED)) for tier, names in tiers.items()}
        return {tier: names for tier, names in listed.items() if names}

    def _loaded(self, loras: tuple[RowLora, ...]) -> SequenceLoras:
        name = lora_set_name(loras)
        self._members[name] = loras
        begun = time.perf_counter()
        try:
            found = self._sets.load(name, lambda: self._made(name, loras, counted=True))
        except Exception:
            self._count("failed")
            raise
        if not found.loaded:
            self._count("hits_device")
        with self._lock:
            self._waited_s += time.perf_counter() - begun if found.loaded else 0.0
        if found.value is None:
            raise RuntimeError(f"the set {name} was not made")
        return found.value

    def _made(self, name: str, loras: tuple[RowLora, ...], *, counted: bool) -> SequenceLoras:
        files = [(self._file(lora, counted=counted), lora.scale) for lora in loras]
        begun = time.perf_counter()
        if self._stream is None:
            tensors = [
                ({at: tensor.to(self._dtype) for at, tensor in file.items()}, scale) for file, scale in files
            ]
            made = self._make(name, tensors)
        else:
            made = self._on_gpu(name, files)
        self._tell(Tier.MEMORY, sum(lora.size_bytes for lora in loras), begun)
        return made

    def _on_gpu(self, name: str, files: Sequence[tuple[Factors, float]]) -> SequenceLoras:
        """Made of factors that are copied from pinned pages, beside the computing."""

        def moved(file: Factors) -> Factors:
            to = partial(Tensor.to, device=self._device, dtype=self._dtype, non_blocking=True)
            return {at: to(tensor.pin_memory()) for at, tensor in file.items()}

        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            made = self._make(name, [(moved(file), scale) for file, scale in files])
        for part in made.tensors:  # steps may still read the set when it is let go
            part.record_stream(computing)
        self._stream.synchronize()  # rows find the set when it is all there
        return made

    def _tell(self, source: Tier | None, size_bytes: int, begun: float) -> None:
        load_ms = (time.perf_counter() - begun) * 1e3
        self._told(AdapterLoad(source=source, size_bytes=size_bytes, load_ms=load_ms))

    def _prefetched(self, loras: tuple[RowLora, ...]) -> None:
        name = lora_set_name(loras)
        try:
            if name in self._sets:
                return
            for lora in loras:
                if lora.digest not in self._files:
                    self._file(lora, counted=False)
                    self._count("prefetched")
            if sum(lora.size_bytes for lora in loras) <= self._sets.room_bytes:
                self._members[name] = loras
                self._sets.load(name, lambda: self._made(name, loras, counted=False), ahead=True)
        except Exception:  # a load's edge: the row that needs it tries again, and is told
            log.exception("loras_not_prefetched", loras=[lora.digest for lora in loras])

    def _file(self, lora: RowLora, *, counted: bool) -> Factors:
        fetched = False

        def read() -> Factors:
            nonlocal fetched
            with self._disk.pinned(lora.digest):  # once it is mapped, it may go
                fetched = self._on_disk(lora, ahead=not counted)
                try:
                    digest = None if fetched else lora.digest
                    return open_lora(self._disk.path(lora.digest), digest, self._layers)
                except Exception:
                    self._disk.remove(lora.digest)
                    raise

        begun = time.perf_counter()
        found = self._files.load(lora.digest, read, ahead=not counted)
        if found.loaded:
            self._tell(None if fetched else Tier.DISK, lora.size_bytes, begun)
        if counted:
            self._count("misses" if fetched else "hits_disk" if found.loaded else "hits_memory")
        if found.value is None:
            raise RuntimeError(f"the file {lora.digest} was not read")
        return found.value

    def _on_disk(self, lora: RowLora, *, ahead: bool) -> bool:
        """Have the file in the folder; whether it had to be fetched. One thread asks for a file at a time."""
        if self._disk.use(lora.digest):
            return False
        with self._disk.writing(lora.digest) as path:
            self._fetch(lora, path, ahead)
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1


@contextmanager
def tiers_of(
    config: DenoiserConfig, bus: Bus, network: Network, told: Callable[[AdapterLoad], None]
) -> Iterator[LoraTiers]:
    """The tiers of one process. Loads ask the LoRA store on the running event loop, from threads of their own.

    Each hop of a LoRA is `told`, in these threads.
    """
    with ExitStack() as stack:
        folder = config.lora_cache_folder
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        budgets = LoraTierCapacities(
            config.cache_disk_mb << 20, config.lora_memory_mb << 20, config.lora_device_mb << 20
        )
        fetch = LoraStoreFetcher(bus, config.lora_file_bytes, config.lora_folder, config.lora_host_folder)
        made = LoraTiers(fetch, low_rank, network.layers, folder, budgets, loads=config.lora_loads, told=told)
        tiers = stack.enter_context(made)
        stack.callback(fetch.close)  # first, or the threads would wait for this loop while it waits for them
        yield tiers


@asynccontextmanager
async def hold_loras(
    tiers: LoraTiers, rows: Iterable[Row]
) -> AsyncIterator[asyncio.Future[list[SequenceLoras]]]:
    """Load the sets of `rows`, and keep them where rows use them.

    The future ends when all are there, or has the first error of a load.
    """
    sets = {row.adapters.loras for row in rows if row.adapters.loras}
    with ExitStack() as stack:
        loads = [asyncio.wrap_future(stack.enter_context(tiers.held(loras))) for loras in sets]
        arriving = asyncio.ensure_future(asyncio.gather(*loads))
        try:
            yield arriving
        finally:
            arriving.cancel()
            await asyncio.wait([arriving])
            if not arriving.cancelled():  # whoever waited for it has heard of its error
                arriving.exception()
