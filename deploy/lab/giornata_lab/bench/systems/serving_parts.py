"""What the systems that serve edits share: models, pictures, rows, and a thread that works while there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.models import TOKEN_PIXELS
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.static_batching import StaticBatching
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.systems.prepost import Array, Coder, CoderProcess


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
