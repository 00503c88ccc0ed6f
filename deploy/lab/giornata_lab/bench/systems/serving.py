"""Systems that serve edits from pixels to pixels in real time: the engine, its baselines, and diffusers' pipeline.

Each takes edits from any thread and tells `done` of every finished one. They differ in how edits are batched and in
where pictures are encoded and decoded.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from diffusers import FluxInpaintPipeline

from giornata.planning.cost_model import fit
from giornata.scheduling.batch import BatchingMode, RowKey
from giornata.scheduling.demand import RowLoad, WorkerLoad
from giornata.scheduling.placement import slack_while
from giornata.wire.workers import StepSample
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.models import LATENT_CHANNELS, TOKEN_PIXELS, autoencoder
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.static_batching import StaticBatching
from giornata_lab.bench.compute.workload import WorkloadEdit

Array = npt.NDArray[np.float32]
PIPELINE: Any = FluxInpaintPipeline


class Coder:
    """The autoencoder of the benchmarks, packing as the pipeline does."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.model = autoencoder(dtype, device)

    @torch.inference_mode()
    def encode(self, pixels: Array) -> Array:
        """(3, height, width) in 0..1 → (tokens, channels) latents, the posterior's mode."""
        config = self.model.config
        picture = torch.from_numpy(pixels)[None].to(self._device, self._dtype) * 2 - 1
        mode = self.model.encode(picture).latent_dist.mode()
        latents = (mode - config.shift_factor) * config.scaling_factor
        height, width = latents.shape[-2:]
        packed = PIPELINE._pack_latents(latents, 1, LATENT_CHANNELS, height, width)
        return np.asarray(packed[0].float().cpu())

    @torch.inference_mode()
    def decode(self, latents: Array, pixels: int) -> npt.NDArray[np.uint8]:
        """(tokens, channels) of a square picture of `pixels` a side → (pixels, pixels, 3)."""
        config = self.model.config
        packed = torch.from_numpy(latents)[None].to(self._device, self._dtype)
        unpacked = PIPELINE._unpack_latents(packed, pixels, pixels, 8)
        scaled = unpacked / config.scaling_factor + config.shift_factor
        picture = self.model.decode(scaled, return_dict=False)[0][0]
        levels = ((picture.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return np.asarray(levels.permute(1, 2, 0).cpu())


class CoderProcess:
    """A :class:`Coder` in another process; work is done one piece after the other."""

    def __init__(self, pool: ProcessPoolExecutor, dtype: torch.dtype, device: torch.device) -> None:
        self._pool, self._dtype, self._device = pool, dtype, device

    def encode(self, pixels: Array, then: Callable[[Array], object]) -> None:
        """Call `then`, in a thread of the pool, with what :meth:`Coder.encode` returns."""
        work = self._pool.submit(_encode, self._dtype, str(self._device), pixels)
        work.add_done_callback(lambda done: then(done.result()))

    def decode(self, latents: Array, pixels: int, then: Callable[[object], object]) -> Future[Any]:
        """Likewise for :meth:`Coder.decode`."""
        work = self._pool.submit(_decode, self._dtype, str(self._device), latents, pixels)
        work.add_done_callback(lambda done: then(done.result()))
        return work


@contextmanager
def coder_process(dtype: torch.dtype, device: torch.device, pixels: int) -> Iterator[CoderProcess]:
    """A process with one thread, warmed up with a picture of `pixels` a side, for as long as the context lasts."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        empty = np.zeros((3, pixels, pixels), np.float32)
        latents = pool.submit(_encode, dtype, str(device), empty).result()
        pool.submit(_decode, dtype, str(device), latents, pixels).result()
        yield CoderProcess(pool, dtype, device)


@lru_cache(maxsize=1)
def _coder(dtype: torch.dtype, device: str) -> Coder:
    return Coder(dtype, torch.device(device))


def _encode(dtype: torch.dtype, device: str, pixels: Array) -> Array:
    return _coder(dtype, device).encode(pixels)


def _decode(dtype: torch.dtype, device: str, latents: Array, pixels: int) -> npt.NDArray[np.uint8]:
    return _coder(dtype, device).decode(latents, pixels)


@dataclass(frozen=True, eq=False)
class Parts:
    """What systems are made of."""

    rows: Rows
    static: StaticBatching
    coder: Coder
    """In this process."""
    process: CoderProcess
    batch: int
    """Most rows of a step or of a call."""

    @property
    def pixels(self) -> int:
        """A side of the pictures."""
        return self.rows.side * TOKEN_PIXELS

    def picture(self, edit: WorkloadEdit) -> Array:
        """(3, pixels, pixels) in 0..1: an edit's template."""
        chance = np.random.default_rng(edit.template)
        return chance.random((3, self.pixels, self.pixels), np.float32)

    def row(self, edit: WorkloadEdit, latents: Array, *, reuse: bool) -> Row:
        """An edit's row, of the latents of its picture."""
        return self.rows.row(edit, reuse=reuse, picture=torch.from_numpy(latents))


class Worker:
    """A thread that calls `work` for as long as there is any, inside :meth:`running`."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._stopping = False
        self._news = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The thread lives inside."""
        thread = threading.Thread(target=self._run, name="worker")
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify()
            thread.join()

    def wake(self) -> None:
        """There is work."""
        with self._changed:
            self._news += 1
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._news > 0)
                if self._stopping:
                    return
                self._news = 0
            while self._work():
                pass


Done = Callable[[WorkloadEdit], object]


class ServingSystem(Protocol):
    """Serves edits."""

    def submit(self, edits: Sequence[WorkloadEdit]) -> None:
        """Take the edits of a request; returns at once."""


class StaticServer:
    """Diffusers' pipeline: who waits when it is free is one batch, padded to its longest edit; all leave together."""

    def __init__(self, parts: Parts, done: Done) -> None:
        self._parts, self._done = parts, done
        self._waiting: deque[WorkloadEdit] = deque()
        self.worker = Worker(self._work)

    def submit(self, edits: Sequence[WorkloadEdit]) -> None:
        """See :class:`ServingSystem`."""
        self._waiting.extend(edits)
        self.worker.wake()

    def _work(self) -> bool:
        count = min(len(self._waiting), self._parts.batch)
        if not count:
            return False
        batch = [self._waiting.popleft() for _ in range(count)]
        pictures = torch.stack([torch.from_numpy(self._parts.picture(edit)) for edit in batch])
        self._parts.static.edited(batch, max(edit.steps for edit in batch), pictures)
        for edit in batch:
            self._done(edit)
        return True


class Strawman:
    """Continuous batching with encoding and decoding in the engine's own thread, between its steps."""

    def __init__(self, parts: Parts, done: Done, engine: Engine) -> None:
        self._parts, self._done, self._engine = parts, done, engine
        self._arrived: deque[WorkloadEdit] = deque()
        self._edits: dict[RowKey, WorkloadEdit] = {}
        self.worker = Worker(self._work)

    def submit(self, edits: Sequence[WorkloadEdit]) -> None:
        """See :class:`ServingSystem`."""
        self._arrived.extend(edits)
        self.worker.wake()

    def _work(self) -> bool:
        while self._arrived:
            edit = self._arrived.popleft()
            row = self._parts.row(edit, self._parts.coder.encode(self._parts.picture(edit)), reuse=True)
            self._edits[row.key] = edit
            self._engine.batch.submit([row])
        report = self._engine.step()
        if report is None:
            return False
        for row in finished(report):
            self._parts.coder.decode(on_host(row), self._parts.pixels)
            self._done(self._edits.pop(row.key))
        return True


class Disaggregated:
    """The engine in its loop, encoding and decoding in another process: as the services are.

    Rows wait in a line, and the engine gets as many as the router would give it, by what its steps have taken so far.

    Args:
        parts: what it is made of.
        done: told of finished edits.
        reuse: whether rows take from templates.
        joining: when rows join; batches of whole requests have no line.
    """

    def __init__(self, parts: Parts, done: Done, *, reuse: bool, joining: BatchingMode) -> None:
        self._parts, self._done, self._reuse, self._joining = parts, done, reuse, joining
        self._edits: dict[RowKey, WorkloadEdit] = {}
        self._lock, self._line, self._given = threading.Lock(), deque[Row](), 0
        self._steps = deque[StepSample](maxlen=200)
        self._load: WorkerLoad | None = None
        """What a step of one row takes, by these steps; None after another one until it is asked for."""
        self.loop: EngineLoop

    def submit(self, edits: Sequence[WorkloadEdit]) -> None:
        """See :class:`ServingSystem`."""
        for edit in edits:
            self._parts.process.encode(self._parts.picture(edit), partial(self._encoded, edit))

    def told(self, report: StepReport) -> None:
        """In the engine's thread, after every step."""
        ended = finished(report)
        with self._lock:
            self._given -= len(ended)
            if report.sample is not None:
                self._steps.append(report.sample)
                self._load = None
            self._give()
        for row in ended:
            edit = self._edits.pop(row.key)
            self._parts.process.decode(on_host(row), self._parts.pixels, partial(self._decoded, edit))

    def _encoded(self, edit: WorkloadEdit, latents: Array) -> None:
        row = self._parts.row(edit, latents, reuse=self._reuse)
        self._edits[row.key] = edit
        with self._lock:
            self._line.append(row)
            self._give()

    def _give(self) -> None:
        """Let the engine have rows of the line while it has fewer than are worth it."""
        while self._line and self._given < self._places():
            self._given += 1
            self.loop.submit([self._line.popleft()])

    def _places(self) -> int:
        if self._joining is BatchingMode.REQUEST or len(self._steps) < 2:
            return sys.maxsize
        if self._load is None:
            steps = np.array([(step.calls, step.linear, step.step_ms, step.rows) for step in self._steps])
            base_ms, rate = fit(("calls", "linear"), steps[:, :2], steps[:, 2], relative=True).weights
            row = RowLoad(1, rate * steps[:, 1].sum() / steps[:, 3].sum())
            self._load = WorkerLoad(self._parts.batch, base_ms, (row,))
        return self._load.worth(slack_while(len(self._line), 1))

    def _decoded(self, edit: WorkloadEdit, _: object) -> None:
        self._done(edit)


def finished(report: StepReport) -> list[Row]:
    """The rows that have left; a failed one raises."""
    if report.failed:
        raise report.failed[0].error
    return [row for row in report.advanced if row.done]


def on_host(row: Row) -> Array:
    """(tokens, channels): a row's latents."""
    return np.asarray(row.latent.float().cpu())


@contextmanager
def static_server(parts: Parts, done: Done) -> Iterator[ServingSystem]:
    """:class:`StaticServer`, running."""
    system = StaticServer(parts, done)
    with system.worker.running():
        yield system


@contextmanager
def strawman(parts: Parts, done: Done) -> Iterator[ServingSystem]:
    """:class:`Strawman`, running."""
    with engines.engine_with(parts.rows.family, rows=parts.batch) as engine:
        system = Strawman(parts, done, engine)
        with system.worker.running():
            yield system


@contextmanager
def disaggregated(
    parts: Parts, done: Done, *, reuse: bool, joining: BatchingMode = BatchingMode.STEP
) -> Iterator[ServingSystem]:
    """:class:`Disaggregated`, running."""
    system = Disaggregated(parts, done, reuse=reuse, joining=joining)
    crashed: list[Exception] = []
    with (
        engines.engine_with(parts.rows.family, rows=parts.batch, joining=joining) as engine,
        EngineLoop(engine, system.told, crashed.append) as loop,
    ):
        system.loop = loop
        yield system
    if crashed:
        raise crashed[0]


Opens: Any = Callable[[Parts, Done], Any]
SYSTEMS: dict[str, Opens] = {
    "static batching": static_server,
    "request-level with reuse": partial(disaggregated, reuse=True, joining=BatchingMode.REQUEST),
    "strawman with reuse": strawman,
    "ours without reuse": partial(disaggregated, reuse=False),
    "ours with reuse": partial(disaggregated, reuse=True),
}
"""How each is opened; no name has a comma, which stands between names on the command line."""
