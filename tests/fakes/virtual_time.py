"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from unittest import mock

from tests.patience import HUNG_S

T = TypeVar("T")

NS: Final = 1_000_000_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only where nothing is left to do until a timer, or by :meth:`pass_time`.

    What runs in another thread takes no time: the clock stands while the loop waits for it. What has come by a socket
    is read before time passes; a peer in another process is not waited for.
    """

    def __init__(self, began_s: float = 0.0) -> None:
        self._now = began_s
        self.threads = 0
        """Calls under way in other threads."""
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """As if code had computed for so long."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # typeshed has TypeVarTuple
        """Run in a thread, while the clock stands."""
        self.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: object) -> None:
        self.threads -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        """End the threads, while the clock stands."""
        self.threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self.threads -= 1


class ClockedLoop(VirtualLoop):
    """A virtual loop of which the clocks of module `time` tell the time while it runs, in its thread alone.

    It begins at the time of the machine's clocks, so that what was read before compares with what is read within.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic())
        self._ahead_s = time.time() - time.monotonic()

    def run_forever(self) -> None:
        """Run, with the clocks."""
        with self._clocks():
            super().run_forever()

    @contextmanager
    def _clocks(self) -> Iterator[None]:
        thread = threading.get_ident()

        def told(name: str, here: Callable[..., Any]) -> Any:
            elsewhere = getattr(time, name)

            def tell(*args: Any) -> Any:
                return (here if threading.get_ident() == thread else elsewhere)(*args)

            return mock.patch.object(time, name, tell)

        with (
            told("monotonic", self.time),
            told("monotonic_ns", lambda: int(self.time() * NS)),
            told("perf_counter", self.time),
            told("clock_gettime", lambda _clock: self.time()),
            told("time", lambda: self.time() + self._ahead_s),
            told("time_ns", lambda: int((self.time() + self._ahead_s) * NS)),
        ):
            yield


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        if self._loop.threads and timeout != 0:
            return super().select(HUNG_S)
        if timeout is None:
            raise RuntimeError("nothing is left that could ever happen")
        self._loop.pass_time(max(0.0, timeout))
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """`main` to its end, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
