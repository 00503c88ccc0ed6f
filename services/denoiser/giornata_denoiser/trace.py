"""A trace of when blocks computed and when their entries were loaded, for Perfetto or chrome://tracing.

On a CUDA device times are those of the streams, from events that are read when the trace is written: nothing waits for
the device meanwhile. torch's profiler is no substitute: it keeps every operation of its own thread alone, in memory
without a limit, and slows each of them down. The format is two kinds of JSON objects, which needs no library.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from giornata.packed.packing import TraceLane

EVENTS: Final = 200_000
"""Most spans of a trace; older ones are dropped."""
Mark = Callable[[], float]
"""A moment in seconds, known once the device has reached it."""


class Trace:
    """The spans of the engine's and the loader's thread, which may both add some, by the streams of `device`."""

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._lock = threading.Lock()
        self._spans: deque[tuple[TraceLane, str, Mark, Mark, dict[str, object]]] = deque(maxlen=EVENTS)
        self._clock = clock
        self._on_device = torch.device(device).type == "cuda"
        self._mark = _device_marks(clock) if self._on_device else self._host_mark

    @contextmanager
    def span(self, lane: TraceLane, name: str, **arguments: object) -> Iterator[None]:
        """See :meth:`giornata.packed.packing.LaneTracer.span`."""
        began = self._mark()
        try:
            yield
        finally:
            span = (lane, name, began, self._mark(), arguments)
            with self._lock:
                self._spans.append(span)

    def spans(self) -> list[tuple[TraceLane, str, float, float, dict[str, object]]]:
        """Lane, name, begin and end in seconds, and arguments, in order of their begin. Waits for the device."""
        with self._lock:
            spans = list(self._spans)
        if self._on_device:
            torch.cuda.synchronize()
        found = [(lane, name, began(), ended(), arguments) for lane, name, began, ended, arguments in spans]
        return sorted(found, key=lambda span: span[2])

    def chrome(self) -> dict[str, Any]:
        """The Trace Event Format's object: complete events in microseconds, a thread for every lane."""
        lanes = {lane: {"pid": 0, "tid": number} for number, lane in enumerate(TraceLane)}
        names = [
            {"ph": "M", "name": "thread_name", **where, "args": {"name": str(lane)}}
            for lane, where in lanes.items()
        ]
        events = [
            {"ph": "X", "name": name, "cat": str(lane), **lanes[lane], "ts": began * 1e6}
            | {"dur": (ended - began) * 1e6, "args": arguments}
            for lane, name, began, ended, arguments in self.spans()
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chrome()), encoding="utf-8")

    def _host_mark(self) -> Mark:
        now = self._clock()
        return lambda: now


def _device_marks(clock: Callable[[], float]) -> Callable[[], Mark]:
    """Marks of the current stream by CUDA events, counted from one whose moment the host knows."""

    def event() -> Any:
        made: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's is not typed
        made.record()
        return made

    base = event()
    torch.cuda.synchronize()  # once, before anything is traced
    began_s = clock()

    def mark() -> Mark:
        here = event()
        return lambda: began_s + base.elapsed_time(here) / 1e3

    return mark
