"""Systems that serve edits from pixels to pixels in real time: the engine, its baselines, and diffusers' pipeline.

Each takes edits from any thread and tells `done` of every finished one. They differ in how edits are batched and in
where pictures are encoded and decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from giornata.scheduling.batch import BatchingMode, RowKey
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.systems.prepost import Array
from giornata_lab.bench.systems.serving_parts import Parts, Worker

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

    Args:
        parts: what it is made of.
        done: told of finished edits.
        reuse: whether rows take from templates.
    """

    def __init__(self, parts: Parts, done: Done, *, reuse: bool) -> None:
        self._parts, self._done, self._reuse = parts, done, reuse
        self._edits: dict[RowKey, WorkloadEdit] = {}
        self.loop: EngineLoop

    def submit(self, edits: Sequence[WorkloadEdit]) -> None:
        """See :class:`ServingSystem`."""
        for edit in edits:
            self._parts.process.encode(self._parts.picture(edit), partial(self._encoded, edit))

    def told(self, report: StepReport) -> None:
        """In the engine's thread, after every step."""
        for row in finished(report):
            edit = self._edits.pop(row.key)
            self._parts.process.decode(on_host(row), self._parts.pixels, partial(self._decoded, edit))

    def _encoded(self, edit: WorkloadEdit, latents: Array) -> None:
        row = self._parts.row(edit, latents, reuse=self._reuse)
        self._edits[row.key] = edit
        self.loop.submit([row])

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
    system = Disaggregated(parts, done, reuse=reuse)
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
    "request-level, reuse": partial(disaggregated, reuse=True, joining=BatchingMode.REQUEST),
    "strawman, reuse": strawman,
    "ours, reuse off": partial(disaggregated, reuse=False),
    "ours, reuse": partial(disaggregated, reuse=True),
}
"""How each is opened."""
