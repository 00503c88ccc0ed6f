"""The thread in which the model works, one call at a time; calls that finish an edit go first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Precedence(IntEnum):
    """Which waiting call goes first; equals in order of arrival.

    No call starves: at most as many edits finish as have begun.
    """

    FINISH = 0
    BEGIN = 1


class ModelThread:
    """Runs functions in a thread of its own. Used from one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: PriorityQueue[tuple[Precedence, int, Future[Any], Callable[[], Any]]] = PriorityQueue()
        self._tickets = count()

    async def timed(
        self, turn: Precedence, function: Callable[[*Arguments], Result], *args: *Arguments
    ) -> tuple[Result, float]:
        """`function(*args)` in the thread, and the milliseconds it took there.

        A call that is cancelled while it waits never runs.
        """
        future: Future[tuple[Result, float]] = Future()
        self._waiting.put((turn, next(self._tickets), future, partial(_timed, function, *args)))
        self._executor.submit(self._run_first)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the running call."""
        self._executor.shutdown()

    def _run_first(self) -> None:
        *_, future, call = self._waiting.get_nowait()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the call's edge: raised where it is awaited
                future.set_exception(error)


def _timed(function: Callable[[*Arguments], Result], *args: *Arguments) -> tuple[Result, float]:
    began_s = time.perf_counter()
    return function(*args), (time.perf_counter() - began_s) * 1e3
