"""Loading ahead: a thread that gathers slabs in the order in which blocks will want them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from giornata.planning.blocks import Mode
from giornata_denoiser.reuse.slabs import Slabs


class Load(NamedTuple):
    """One slab to be loaded."""

    slabs: Slabs
    block: int
    mode: Mode


class Loaded(NamedTuple):
    """When one was."""

    load: Load
    began_s: float
    ended_s: float


class Loader:
    """The thread, from entering to leaving the context.

    Args:
        rate_bytes_s: no faster than this, as if over a link of that width; None for as fast as it goes. The benchmarks
            of the planner throttle it.
        clock: monotonic seconds.
        on_loaded: told of every slab, in this thread.
    """

    def __init__(
        self,
        rate_bytes_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_loaded: Callable[[Loaded], object] = lambda _: None,
    ) -> None:
        self._rate, self._clock, self._on_loaded = rate_bytes_s, clock, on_loaded
        self._queue: deque[Load] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="loader")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is not loaded by now is loaded at once by this thread's caller, so that nobody waits for ever."""
        with self._changed:
            self._stopping = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        self._thread.join()
        for load in left:
            load.slabs.load(load.block, load.mode)

    def ask(self, loads: Iterable[Load]) -> None:
        """Load these after all that was asked for before; each is expected from now on."""
        with self._changed:
            for load in loads:
                if not load.slabs.has(load.block, load.mode):
                    load.slabs.expect(load.block, load.mode)
                    self._queue.append(load)
            self._changed.notify()

    def forget(self, unwanted: Callable[[Slabs], bool]) -> None:
        """Drop what has not begun of slabs that nobody will ask for."""
        with self._changed:
            self._queue = deque(load for load in self._queue if not unwanted(load.slabs))

    def _run(self) -> None:
        while (load := self._next()) is not None:
            began = self._clock()
            load.slabs.load(load.block, load.mode, partial(self._throttle, load, began))
            self._on_loaded(Loaded(load, began, self._clock()))

    def _throttle(self, load: Load, began_s: float) -> None:
        """Wait until the link would have moved the slab, or the loader stops."""
        if self._rate is not None:
            due_s = began_s + load.slabs.size_bytes(load.block, load.mode) / self._rate
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, max(0.0, due_s - self._clock()))

    def _next(self) -> Load | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._queue))
            return None if self._stopping else self._queue.popleft()
