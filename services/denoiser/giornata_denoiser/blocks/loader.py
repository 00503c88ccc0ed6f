"""Loading ahead: a thread that gathers slabs in the order in which blocks will want them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Final, Self

from giornata_denoiser.blocks.device import Arrival
from giornata_denoiser.blocks.loads import Load, Loaded

GIVEN: Final = 2
"""Loads that a GPU's copy stream is given ahead: it never idles, and what becomes urgent waits for no more."""


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
        self.under_way: Load | None = None
        """See :class:`giornata_denoiser.blocks.loads.LoadsAhead`."""
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

    def schedule(self, loads: Iterable[Load]) -> None:
        """Load these, in this order; they are expected from now on.

        What was scheduled before and is not among them is dropped, unless it has begun.
        """
        wanted = dict.fromkeys(loads)
        with self._changed:
            queued = set(self._queue)
            for load in queued - wanted.keys():
                load.slabs.drop(load.block, load.mode)
            self._queue.clear()
            for load in wanted:
                if load not in queued:
                    if load.slabs.has(load.block, load.mode):
                        continue
                    load.slabs.expect(load.block, load.mode)
                self._queue.append(load)
            self._changed.notify()

    def _run(self) -> None:
        given: deque[Arrival] = deque()
        while (load := self._next()) is not None:
            self.under_way = load
            began, size = self._clock(), load.slabs.load_bytes(load.block, load.mode)
            given.append(load.slabs.load(load.block, load.mode, partial(self._throttle, size, began)))
            if len(given) > GIVEN:
                given.popleft().finish()
            self._on_loaded(Loaded(load, size, began, self._clock()))
            self.under_way = None
            del load  # whose slabs would otherwise stay while nothing is to be done

    def _throttle(self, size_bytes: int, began_s: float) -> None:
        """Wait until the link would have moved the slab, or the loader stops."""
        if self._rate is not None:
            due_s = began_s + size_bytes / self._rate
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, max(0.0, due_s - self._clock()))

    def _next(self) -> Load | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._queue))
            return None if self._stopping else self._queue.popleft()
