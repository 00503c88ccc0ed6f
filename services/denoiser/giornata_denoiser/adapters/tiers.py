"""The tiers of a denoiser's LoRAs: on disk, as mapped pages in memory, and as sets on the device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import structlog
import torch
from torch import Tensor, nn

from giornata.bus.bus import Bus
from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.residency.tiers import FolderTier, LoadedTier
from giornata.scratch import scratch_folder
from giornata.wire.workers import AdapterCounters, AdapterLoad, Tier
from giornata_denoiser.adapters.files import LoraFile, LoraStoreFetcher, open_lora
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Row, RowLora, name_of

# Where LoRAs are: on disk, as mapped pages in memory, and as sets on the device.
#
# Loads run in a few threads of their own; a load that is under way serves all that wait for it. Sets that
# rows use or wait for are pinned: no eviction takes them from running rows.


SUFFIX: Final = ".lora.safetensors"
LISTED: Final = 256
"""Digests of each tier that telemetry lists."""

log = structlog.get_logger(__name__)


class LoraSet(Protocol):
    """Factors of a set of LoRAs on the device."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""

    @property
    def tensors(self) -> Iterable[Tensor]:
        """All factors."""


S = TypeVar("S", bound=LoraSet)


class LoraFetcher(Protocol):
    """Brings files of LoRAs."""

    def __call__(self, lora: RowLora, path: Path, *, ahead: bool) -> None:
        """Write a LoRA's canonical file to a path, and compare its digest; `ahead` of a row that waits for it.

        Waits; raises a GiornataError where the LoRA store has none, or other bytes.
        """


Make = Callable[[str, Sequence[tuple[Mapping[str, Tensor], float]]], S]
"""Makes the set of this name of its LoRAs' tensors, on the device and in the network's dtype, and scales."""


class LoraTierCapacities(NamedTuple):
    """Most bytes of what is not pinned, by tier."""

    disk: int
    memory: int
    device: int


class LoraTiers(Generic[S]):
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
        fetch: LoraFetcher,
        make: Make[S],
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
        self._files: LoadedTier[LoraFile] = LoadedTier(budgets.memory, lambda file: file.size_bytes)
        self._sets: LoadedTier[S] = LoadedTier(budgets.device, lambda made: made.size_bytes)
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

    def find(self, loras: tuple[RowLora, ...]) -> S | None:
        """The set of these LoRAs on the device; the same object while it stays. None while it is not loaded."""
        return self._sets.get(name_of(loras))

    @contextmanager
    def held(self, loras: tuple[RowLora, ...]) -> Iterator[Future[S]]:
        """The set of these LoRAs, which is loaded at once and stays within the context.

        The future has the load's error where it fails. A load that has not begun when the context ends is let go.
        """
        name = name_of(loras)
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

    def plan(self, loras: Iterable[RowLora]) -> None:
        """Bring files into memory where they fit beside pinned ones: the placement wants them there."""
        for lora in loras:
            self._threads.submit(self._planned, lora)

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

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Digests of LoRAs that are here, the last used first, at most :data:`LISTED` a tier."""
        sets = [lora.digest for name in reversed(tuple(self._sets)) for lora in self._members[name]]
        memory, disk = reversed(tuple(self._files)), reversed(tuple(self._disk))
        tiers = {Tier.DEVICE: sets, Tier.MEMORY: memory, Tier.DISK: disk}
        listed = {tier: tuple(islice(dict.fromkeys(names), LISTED)) for tier, names in tiers.items()}
        return {tier: names for tier, names in listed.items() if names}

    def _loaded(self, loras: tuple[RowLora, ...]) -> S:
        name = name_of(loras)
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

    def _made(self, name: str, loras: tuple[RowLora, ...], *, counted: bool) -> S:
        files = [(self._file(lora, counted=counted), lora.scale) for lora in loras]
        begun = time.perf_counter()
        made = self._on_device(name, files)
        self._tell(Tier.MEMORY, sum(lora.size_bytes for lora in loras), begun)
        return made

    def _on_device(self, name: str, files: Sequence[tuple[LoraFile, float]]) -> S:
        if self._stream is None:
            return self._make(name, [(self._moved(file), scale) for file, scale in files])
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            made = self._make(name, [(self._moved(file), scale) for file, scale in files])
        for part in made.tensors:  # steps may still read the set when it is let go
            part.record_stream(computing)
        self._stream.synchronize()  # rows find the set when it is all there
        return made

    def _tell(self, source: Tier | None, size_bytes: int, begun: float) -> None:
        load_ms = (time.perf_counter() - begun) * 1e3
        self._told(AdapterLoad(source=source, size_bytes=size_bytes, load_ms=load_ms))

    def _moved(self, file: LoraFile) -> dict[str, Tensor]:
        """The factors on the device, from pinned pages where that is another one."""
        if self._device.type == "cpu":
            return {name: tensor.to(self._dtype) for name, tensor in file.tensors.items()}
        return {
            name: tensor.pin_memory().to(self._device, self._dtype, non_blocking=True)
            for name, tensor in file.tensors.items()
        }

    def _prefetched(self, loras: tuple[RowLora, ...]) -> None:
        name = name_of(loras)
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

    def _planned(self, lora: RowLora) -> None:
        try:
            if lora.digest not in self._files and lora.size_bytes <= self._files.room_bytes:
                self._file(lora, counted=False)
                self._count("planned")
        except Exception:  # a load's edge: the row that needs it tries again, and is told
            log.exception("lora_not_loaded_by_plan", lora=lora.digest)

    def _file(self, lora: RowLora, *, counted: bool) -> LoraFile:
        fetched = False

        def read() -> LoraFile:
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
            self._fetch(lora, path, ahead=ahead)
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1


# The LoRAs of a denoiser's rows: tiers over the LoRA store, and what an attempt keeps of them while it
# runs.


@contextmanager
def tiers_of(
    config: DenoiserConfig, bus: Bus, network: Network, told: Callable[[AdapterLoad], None]
) -> Iterator[LoraTiers[SequenceLoras]]:
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
        tiers: LoraTiers[SequenceLoras] = LoraTiers(
            fetch,
            low_rank,
            network.layers,
            folder,
            budgets,
            loads=config.lora_loads,
            told=told,
        )
        stack.enter_context(tiers)
        stack.callback(fetch.close)  # first, or the threads would wait for this loop while it waits for them
        yield tiers


@asynccontextmanager
async def hold_loras(
    tiers: LoraTiers[SequenceLoras], rows: Iterable[Row]
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
