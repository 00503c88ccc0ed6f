"""Moving tensors beside the computing: slabs to the engine's device, recordings to host memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor

from giornata.planning.cost_model import CostModel
from giornata.residency.ledger import EvictionLedger
from giornata.wire.values import BlockMode
from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.engine.slabs import Device, Slabs, TransferHandle, WaitTimer
from giornata_denoiser.engine.step_budget import ENTRIES_ON_DEVICE
from giornata_denoiser.rows.template import Entry, StoredTensor

log = structlog.get_logger(__name__)

GIVEN: Final = 2
"""Loads that a GPU's copy stream is given ahead: it never idles, and what becomes urgent waits for no more."""


class SlabLoad(NamedTuple):
    """One slab to be loaded."""

    slabs: Slabs
    block: int
    mode: BlockMode


class SlabRun(NamedTuple):
    """The blocks of one entry that one sequence takes in one step."""

    slabs: Slabs
    forms: tuple[BlockMode, ...]
    """What is loaded of each block; `FULL` loads nothing."""
    blocks: int
    """Only the first so many blocks are loaded."""


class FinishedSlabLoad(NamedTuple):
    """The measurements of a load that has ended."""

    load: SlabLoad
    size_bytes: int
    """Bytes that moved."""
    ms: float


def load_teller(
    device: torch.device, model: CostModel, told: Callable[[LoadSample], object]
) -> Callable[[FinishedSlabLoad], object]:
    """What hears of loads to `device`, for the cost model and for telemetry.

    On a GPU the loader's thread only gives orders: the profile tells how long they take.
    """

    def loaded(load: FinishedSlabLoad) -> None:
        if device.type == "cpu" and load.size_bytes:
            model.observe_load(load.size_bytes, load.ms)
            told(LoadSample(tier=Tier.MEMORY, size_bytes=load.size_bytes, load_ms=load.ms))

    return loaded


class Loader:
    """The thread that loads, from entering to leaving the context.

    With `rate_bytes_s` it is no faster than a link of that width: the benchmarks of the planner throttle it. In this
    thread, `on_loaded` is told of every slab. A load that fails is logged and raised in the block that asks for its
    slab; the next ones go on.
    """

    def __init__(
        self,
        rate_bytes_s: float | None = None,
        on_loaded: Callable[[FinishedSlabLoad], object] = lambda _: None,
    ) -> None:
        self._rate, self._on_loaded = rate_bytes_s, on_loaded
        self._queue: Iterator[SlabLoad] = iter(())
        self._expecting: frozenset[Slabs] = frozenset()
        """What has been told to expect loads."""
        self._changed = threading.Condition()
        self._stopping = False
        self.under_way: SlabLoad | None = None
        """The load that has begun and not ended."""
        self._thread = threading.Thread(target=self._run, name="loader")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Load at once, in the calling thread, what is expected and not loaded: a block may wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        for load in self._queue:
            if load.slabs.begin(load.block, load.mode):
                load.slabs.load(load.block, load.mode)

    def schedule(self, groups: Iterable[Sequence[SlabRun]]) -> None:
        """Expect these and load them: group after group, of each block after block, of each run after run.

        What else was scheduled is dropped, unless it has begun.
        """
        wanted = [tuple(group) for group in groups]
        expected: dict[Slabs, list[tuple[tuple[BlockMode, ...], int]]] = {}
        for slabs, forms, blocks in chain.from_iterable(wanted):
            expected.setdefault(slabs, []).append((forms, blocks))
        with self._changed:
            for slabs in self._expecting - expected.keys():
                slabs.expect()
            for slabs, runs in expected.items():
                slabs.expect(*runs)
            self._expecting = frozenset(expected)
            self._queue = _in_order(wanted)
            self._changed.notify()

    def _run(self) -> None:
        given: deque[TransferHandle] = deque()
        while (load := self._next()) is not None:
            self.under_way = load
            try:
                self._load(load, given)
            except Exception as error:  # a thread's edge: logged, and raised where the slab is asked for
                log.exception("load_failed", block=load.block, mode=load.mode)
                load.slabs.fail(load.block, load.mode, error)
            self.under_way = None
            del load  # whose slabs would otherwise stay while nothing is to be done

    def _load(self, load: SlabLoad, given: deque[TransferHandle]) -> None:
        began, size = time.perf_counter(), load.slabs.load_bytes(load.block, load.mode)
        given.append(load.slabs.load(load.block, load.mode, partial(self._throttle, size, began)))
        if len(given) > GIVEN:
            given.popleft().finish()
        if (error := load.slabs.error(load.block, load.mode)) is not None:
            log.warning("slab_not_loaded", block=load.block, mode=load.mode, error=repr(error))
        self._on_loaded(FinishedSlabLoad(load, size, (time.perf_counter() - began) * 1e3))

    def _throttle(self, size_bytes: int, began_s: float) -> None:
        """Wait until the link would have moved the slab, or the loader stops."""
        if self._rate is not None:
            left_s = began_s + size_bytes / self._rate - time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, max(0.0, left_s))

    def _next(self) -> SlabLoad | None:
        """The next load that no thread has begun; None when the loader stops."""
        with self._changed:
            while not self._stopping:
                begun = (load for load in self._queue if load.slabs.begin(load.block, load.mode))
                if (load := next(begun, None)) is not None:
                    return load
                self._changed.wait()
            return None


def _in_order(groups: Sequence[Sequence[SlabRun]]) -> Iterator[SlabLoad]:
    for group in groups:
        for block in range(max((run.blocks for run in group), default=0)):
            for slabs, forms, blocks in group:
                if block < blocks and forms[block] is not BlockMode.FULL:
                    yield SlabLoad(slabs, block, forms[block])


class CudaTransferHandle(TransferHandle):
    """The arrival of what a copy stream has been given."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed
        """Recorded once the stream has been given everything."""

    @property
    def here(self) -> bool:
        """Return whether the stream has got that far."""
        return bool(self.event.query())

    def finish(self) -> None:
        """Wait for this stream alone."""
        self.event.synchronize()

    def wait(self, *tensors: Tensor) -> None:
        """No synchronisation with the host. The allocator is told of the second stream that uses the memory."""
        stream = torch.cuda.current_stream(tensors[0].device)
        stream.wait_event(self.event)
        for tensor in tensors:
            tensor.record_stream(stream)


class Accelerator(Device):
    """The device of an engine on a GPU.

    Whole tensors are copied from pinned host memory, as they are stored, on a stream of their own beside the computing
    one; blocks gather from the copies, of which rows of one template share one. Copies stay within `budget_bytes`,
    least recently used out first. One thread loads at a time.
    """

    shares = True
    keeps = False

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's is not typed
        self._lock = threading.Lock()
        self._ledger = EvictionLedger(budget_bytes)
        self._produced: Any = None
        """The last point of the computing stream that loading comes after."""
        self._here: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        """Tensors by name: on the host, which keeps the name its own, and on the device."""

    def bring(self, stored: StoredTensor) -> StoredTensor:
        """The tensor from the device's tier, or by an asynchronous copy into it."""
        if stored.data.is_cuda:  # the row's own
            return stored
        name = str(id(stored))
        if name in self._here:
            self._ledger.use(name)
            return self._here[name][1]
        copy = stored.to(self._device)
        self._here[name] = stored, copy
        for gone in self._ledger.add(name, copy.size_bytes):
            del self._here[gone]
        return copy

    def moved_bytes(self, stored: StoredTensor, slab_bytes: int) -> int:  # noqa: ARG002 - gathering there takes no time
        """All of `stored`, or nothing where it is on the device."""
        return 0 if stored.data.is_cuda or str(id(stored)) in self._here else stored.size_bytes

    def give_back(self) -> None:
        """Copies that a load still reads stay until it has ended."""
        with self._lock:
            for name in self._here:
                self._ledger.remove(name)
            self._here.clear()

    def produced(self) -> None:
        """An event on the computing stream, which later loads wait for on theirs."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._produced = event

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        """Return what is done within runs on the copy stream."""
        arrival = CudaTransferHandle()
        with self._lock, torch.cuda.stream(self._stream):
            if self._produced is not None:
                self._stream.wait_event(self._produced)
                self._produced = None  # the stream keeps its order: later loads come after it too
            yield arrival
            arrival.event.record(self._stream)


def device_for(device: torch.device, budget_bytes: int) -> Device:
    """Return how loads get to an engine's device, which keeps `budget_bytes` of them where it is a GPU."""
    return Accelerator(device, budget_bytes) if device.type == "cuda" else Device()


class HostCopy:
    """The locations of entries in host memory as they are recorded."""

    def take(self, entry: Entry) -> Entry:
        """`entry` in host memory; its values are there once :meth:`finish` has returned."""
        return entry

    def finish(self, entries: Sequence[Entry]) -> None:
        """Wait until what :meth:`take` returned is there; raises why one of `entries` never will be."""


class AsyncHostCopy(HostCopy):
    """Moves entries in a thread of its own, by the copy stream of `device`; `waits` hears how long the engine waits."""

    def __init__(self, device: Device, waits: WaitTimer) -> None:
        self._device, self._waits = device, waits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hosting")
        self._moving: deque[tuple[Entry, Future[None]]] = deque()
        self._errors: WeakKeyDictionary[Entry, BaseException] = WeakKeyDictionary()

    def take(self, entry: Entry) -> Entry:
        """See :meth:`HostCopy.take`; waits while too many entries are on the device."""
        moves: list[tuple[Tensor, Tensor]] = []

        def moved(source: Tensor) -> Tensor:
            target = torch.empty(source.shape, dtype=source.dtype)
            moves.append((source, target))
            return target

        hosted = Entry(entry.level, tuple(kept.each(moved) for kept in entry.blocks))
        self._device.produced()
        self._moving.append((hosted, self._thread.submit(self._move, moves)))
        self._wait(ENTRIES_ON_DEVICE - 1)
        return hosted

    def finish(self, entries: Sequence[Entry]) -> None:
        """See :meth:`HostCopy.finish`."""
        self._wait(0)
        for entry in entries:
            if entry in self._errors:
                raise self._errors[entry]

    def _wait(self, left: int) -> None:
        with self._waits.waiting():
            while len(self._moving) > left:
                entry, moved = self._moving.popleft()
                if (error := moved.exception()) is not None:
                    self._errors[entry] = error

    def _move(self, moves: list[tuple[Tensor, Tensor]]) -> None:
        """Fill the second tensor of each pair from the first; both are let go of as soon as that is done.

        The memory is the computing stream's: a tensor is held until it has been read.
        """
        with torch.inference_mode():
            while moves:
                source, target = moves.pop()
                with self._device.loading() as arrival:
                    target.copy_(source)
                arrival.finish()


def hosting_for(device: torch.device, waits: WaitTimer) -> HostCopy:
    """Return how entries that are recorded on `device` get to host memory."""
    return AsyncHostCopy(Accelerator(device, budget_bytes=0), waits) if device.type == "cuda" else HostCopy()
