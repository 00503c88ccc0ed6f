"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only where nothing is left to do until a timer, or by :meth:`pass_time`."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """As if code had computed for so long."""
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that could ever happen")
        self._loop.pass_time(max(0.0, timeout))
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`main` to its end, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
