"""The processes in which untrusted pictures are decoded: a limit on time each, and no torch in them.

A file that keeps a decoder busy costs one process, which is replaced, and one task, which gets an error. A file that
crashes a decoder costs two processes: a process may also die of another cause, so its work gets one more try.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Final, Self, TypeVar, TypeVarTuple

import structlog
from pebble import ProcessExpired, ProcessPool

from giornata.wire.errors import GiornataError, ImageTimeout, ImageUnreadable, InternalError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

PRELOADED: Final = [
    "giornata_prepost.images.inspection",
    "giornata_prepost.images.finishing",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.WebPImagePlugin",
]
"""Modules that the fork server imports once, so that a replacement starts in milliseconds."""

_log = structlog.get_logger(__name__)


class WorkFailed(Exception):
    """An unexpected exception in a pool process, as the text of its traceback: any text survives pickling."""


class ImagePool:
    """Runs module-level functions in processes of its own.

    Used from one event loop; ``async with`` starts and ends the processes. A process is forked from a small server
    (start method `forkserver`), so it holds nothing of this process's memory. It imports the ``__main__`` module: that
    module must not import torch at its top.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._pool = self._new_pool()
        self._running: set[Future[Any]] = set()

    async def __aenter__(self) -> Self:
        await self.run(_nothing, limit_s=60.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in tuple(self._running):
            future.cancel()
        await _end(self._pool)

    async def run(
        self, function: Callable[[*Arguments], Result], *args: *Arguments, limit_s: float
    ) -> Result:
        """The result of :meth:`timed`."""
        result, _ = await self.timed(function, *args, limit_s=limit_s)
        return result

    async def timed(
        self, function: Callable[[*Arguments], Result], *args: *Arguments, limit_s: float
    ) -> tuple[Result, float]:
        """`function(*args)` in one of the processes, and the milliseconds it took there. Cancelling ends its process.

        Args:
            function: a module-level function.
            args: values that pickle.
            limit_s: time for the work itself; waiting for a free process is not counted.

        Raises:
            GiornataError: raised by the function, with every field intact.
            ImageTimeout: it took longer than `limit_s`; its process was ended.
            ImageUnreadable: its process died, and died again at a second try. A retry elsewhere would end another
                process.
            InternalError: it failed unexpectedly (logged), or no process can be started.
        """
        try:
            try:
                return await self._submit(function, args, limit_s)
            except (BrokenProcessPool, ProcessExpired) as error:
                # An idle process that is killed from outside ends a whole pebble pool, a busy one its task.
                _log.warning("image_work_again", function=function.__name__, error=str(error))
                return await self._submit(function, args, limit_s)
        except TimeoutError as error:
            raise ImageTimeout(received=f"more than {limit_s:g} s") from error
        except ProcessExpired as error:
            _log.error("image_process_died", function=function.__name__, exit_code=error.exitcode)
            raise ImageUnreadable("Working on the image ends the process that does it.") from error
        except BrokenProcessPool as error:
            raise InternalError("The image processes cannot be started.") from error
        except WorkFailed as error:
            _log.error("image_work_failed", function=function.__name__, traceback=str(error))
            raise InternalError from error

    async def _submit(
        self, function: Callable[[*Arguments], Result], args: tuple[*Arguments], limit_s: float
    ) -> tuple[Result, float]:
        if not self._pool.active:
            broken, self._pool = self._pool, self._new_pool()
            _log.warning("image_pool_replaced")
            await _end(broken)
        future: Future[tuple[Result, float]] = self._pool.schedule(
            _guarded, args=(function, args), timeout=limit_s
        )
        self._running.add(future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._running.discard(future)

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(max_workers=self._processes, context=self._context)


async def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble annotates all but this
    await asyncio.to_thread(pool.join)


def _guarded(function: Callable[..., Result], args: tuple[Any, ...]) -> tuple[Result, float]:
    """The task's edge in the process: every exception becomes one that pickles."""
    begin = time.perf_counter()
    try:
        return function(*args), (time.perf_counter() - begin) * 1e3
    except GiornataError:
        raise
    except Exception:  # noqa: BLE001 - the task's edge: logged and answered on the other side
        raise WorkFailed(traceback.format_exc()) from None


def _nothing() -> None:
    """The first task: it returns when the processes are up."""
