"""The workers of prepost: files in pools of processes, the model in one thread. The event loop stays free.

The processes read untrusted files, each with a limit on time; those that decode pictures have no torch. A file that
keeps one busy costs one process, which is replaced, and one task, which gets an error. A file that crashes one costs
two processes: a process may also die of another cause, so its work gets one more try.
"""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from enum import IntEnum
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, ClassVar, Final, Self, TypeVar, TypeVarTuple

import structlog
from pebble import ProcessExpired, ProcessPool

from giornata.wire.errors import (
    GiornataError,
    ImageTimeout,
    ImageUnreadable,
    InternalError,
    LoraTooLarge,
    LoraUnreadable,
    StorageFull,
)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_log = structlog.get_logger(__name__)

STANDSTILL: Final = 10
"""A process is ended, too, after so many times its limit by the clock: it stands still, which is no file's fault."""
FORGOTTEN_S: Final = 1.0
"""How often a pool with work is asked whether it broke: pebble then forgets the tasks that it has not handed out."""


class WorkFailed(Exception):
    """An unexpected exception in a pool process, as the text of its traceback: any text survives pickling."""


class WorkPool:
    """Runs module-level functions in processes of its own, which start with the first one.

    Used from one event loop; leaving ``async with`` ends the processes. A process is forked from a small server (start
    method `forkserver`), so it holds nothing of this process's memory. It imports the ``__main__`` module: that module
    must not import torch at its top.
    """

    late: ClassVar[tuple[type[GiornataError], str | None]]
    """Class and message of the error of work that takes too long."""
    deadly: ClassVar[tuple[type[GiornataError], str]]
    """Class and message of the error of work that ends its process."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # the fork server imports these once, so that a replacement starts in milliseconds
        libraries = ["PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin", "scipy.ndimage"]
        stages = [f"giornata_prepost.images.{name}" for name in ("stages", "regions")]
        context.set_forkserver_preload([*stages, *libraries])
        self._new_pool = partial(ProcessPool, max_workers=processes, context=context)
        self._pool = self._new_pool()
        self._running: set[Future[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for future in tuple(self._running):
            future.cancel()
        await _end(self._pool)

    async def timed(
        self, function: Callable[[*Arguments], Result], *args: *Arguments, limit_s: float
    ) -> tuple[Result, float]:
        """`function(*args)` in one of the processes, and the milliseconds it took there. Cancelling ends its process.

        `limit_s` is processor time for the work itself, so that neither a queue nor a busy machine ends it.

        Raises:
            GiornataError: raised by the function, with every field intact. Or it took longer than `limit_s` and its
                process was ended (:attr:`late`), or its process died twice (:attr:`deadly`): a retry elsewhere would
                end another one.
            InternalError: it failed unexpectedly (logged), or no process can be started.
        """
        try:
            try:
                return await self._submit(function, args, limit_s)
            except (BrokenProcessPool, ProcessExpired) as error:
                if _was_late(error):
                    raise
                # An idle process that is killed from outside ends a whole pebble pool, a busy one its task.
                _log.warning("work_again", function=function.__name__, error=str(error))
                return await self._submit(function, args, limit_s)
        except TimeoutError as error:
            _log.error("process_stood_still", function=function.__name__)
            raise InternalError("A process for files stood still.") from error
        except ProcessExpired as error:
            if _was_late(error):
                kind, told = self.late
                raise kind(told, received=f"more than {limit_s:g} s") from error
            _log.error("process_died", function=function.__name__, exit_code=error.exitcode)
            kind, told = self.deadly
            raise kind(told) from error
        except BrokenProcessPool as error:
            raise InternalError("The processes for files cannot be started.") from error
        except WorkFailed as error:
            _log.error("work_failed", function=function.__name__, traceback=str(error))
            raise InternalError from error

    async def _submit(
        self, function: Callable[[*Arguments], Result], args: tuple[*Arguments], limit_s: float
    ) -> tuple[Result, float]:
        if not self._pool.active:
            broken, self._pool = self._pool, self._new_pool()
            _log.warning("pool_replaced")
            await _end(broken)
        pool = self._pool
        future: Future[tuple[Result, float]] = pool.schedule(
            _guarded, args=(limit_s, function, *args), timeout=STANDSTILL * limit_s
        )
        self._running.add(future)
        answer = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({answer}, timeout=FORGOTTEN_S))[0]:
                if not pool.active:
                    raise BrokenProcessPool("The pool broke before it took the task.")
            return answer.result()
        finally:
            answer.cancel()
            self._running.discard(future)


class ImagePool(WorkPool):
    """Works on pictures. All processes are up on entering."""

    late = ImageTimeout, None
    deadly = ImageUnreadable, "Working on the image ends the process that does it."

    async def __aenter__(self) -> Self:
        await self.timed(os.getpid, limit_s=60.0)  # it returns when the processes are up
        return self


class LoraPool(WorkPool):
    """Reads LoRAs. A process starts with the first one, and only it loads torch."""

    late = LoraTooLarge, "Reading the LoRA takes too long."
    deadly = LoraUnreadable, "Reading the LoRA ends the process that does it."


class CallPriority(IntEnum):
    """The order of waiting calls; equals in order of arrival.

    No call starves: at most as many edits finish as have begun.
    """

    FINISH = 0
    BEGIN = 1


class ModelThread:
    """Runs functions in a thread of its own, one at a time. Used from one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: PriorityQueue[tuple[CallPriority, int, Future[Any], Callable[[], Any]]] = (
            PriorityQueue()
        )
        self._tickets = count()

    async def timed(
        self, turn: CallPriority, function: Callable[[*Arguments], Result], *args: *Arguments
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


async def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble annotates all but this
    await asyncio.to_thread(pool.join)


def _was_late(error: Exception) -> bool:
    return isinstance(error, ProcessExpired) and error.exitcode == -signal.SIGPROF


def _guarded(
    limit_s: float, function: Callable[[*Arguments], Result], *args: *Arguments
) -> tuple[Result, float]:
    """The task's edge in the process: every exception becomes one that pickles, and too much work ends the process."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return _timed(function, *args)
    except GiornataError:
        raise
    except Exception as error:  # noqa: BLE001 - the task's edge: logged and answered on the other side
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFull(received=os.strerror(error.errno), retry_after_s=10) from None
        raise WorkFailed(traceback.format_exc()) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _timed(function: Callable[[*Arguments], Result], *args: *Arguments) -> tuple[Result, float]:
    began_s = time.perf_counter()
    return function(*args), (time.perf_counter() - began_s) * 1e3
