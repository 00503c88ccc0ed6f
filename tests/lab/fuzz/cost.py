"""What an input costs its reader: processor time, memory, and calls of functions.

A stranger's few bytes must not become much work: time that one input takes is time in which no other client is
answered. ``make fuzz`` measures time and memory. ``make test`` measures memory and calls, which are the same on every
machine.
"""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

LONGEST_S: Final = 0.1
"""Most processor time of one input."""
TIMES: Final = 10
"""Most bytes of memory, at its peak, for each byte of an input."""
FLOOR_BYTES: Final = 8 << 20
"""Memory that any input may take: of pictures, the pixels; of others, what their first one loads."""
CALLS: Final = 600_000
"""Most calls of functions for one input."""
TRIES: Final = 3
"""An input that is slow once may have met another process in its caches."""


class TooCostlyError(BaseException):
    """An input costs more than it may; no reader takes this for a refusal."""


def check_time(target: Callable[[bytes], None], data: bytes) -> None:
    """Run `target` on `data`; TooCostlyError where that takes too long each time."""
    took_s: list[float] = []
    while len(took_s) < TRIES:
        began_s = time.process_time()
        target(data)
        took_s.append(time.process_time() - began_s)
        if took_s[-1] <= LONGEST_S:
            return
    raise TooCostlyError(f"{min(took_s) * 1e3:.0f} ms of processor time for {len(data)} bytes")


def check_memory(target: Callable[[bytes], None], data: bytes) -> None:
    """Run `target` on `data`; TooCostlyError where the peak of its memory is too high."""
    tracemalloc.start()
    try:
        target(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak_bytes > TIMES * len(data) + FLOOR_BYTES:
        raise TooCostlyError(f"{peak_bytes} bytes of memory for {len(data)} bytes")


def check_calls(target: Callable[[bytes], None], data: bytes) -> None:
    """Run `target` on `data`; TooCostlyError at the first call of a function beyond :data:`CALLS`, in any thread."""
    with _counted():
        target(data)


@contextmanager
def _counted() -> Iterator[None]:
    left = CALLS

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal left
        if event not in {"call", "c_call"}:
            return
        left -= 1
        if left == 0:  # once: raised in a second thread, too, it would break what waits for the first
            raise TooCostlyError(f"more than {CALLS} calls of functions")

    before = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
