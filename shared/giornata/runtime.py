"""The run of every process: configuration, logs, uvloop, signals, memory, exit status."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Final, TypeVar

import structlog
import uvloop

from giornata import tracing
from giornata.config import ServiceConfig, load
from giornata.logs import configure_logs, end_logs
from giornata.wire.errors import GiornataError
from giornata.wire.workers import ServiceName

OPTIONS: Final[Mapping[int, int]] = {
    -8: 1,  # M_ARENA_MAX: threads share one heap; another thread's could not hold a large tensor
    -3: 1 << 30,  # M_MMAP_THRESHOLD: smaller allocations come from the heap, not from the kernel
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD: so many free bytes at its end stay with the process
}
"""Values of the options of glibc's `mallopt`, by number; `malloc.h` has the names."""


def keep_freed() -> bool:
    """Keep freed memory for the next allocation; whether the C library can. For processes that compute on a processor.

    By default glibc gives every tensor above 32 MiB back to the kernel. The next one is then made of pages that the
    kernel clears at first touch, which takes a batch of UNet rows a tenth of its step. Before the first thread starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) for option, value in OPTIONS.items())


def on_signals(first: Callable[[str], None], later: Callable[[str], None]) -> None:
    """Have the running loop call `first` at the first SIGINT or SIGTERM and `later` at every other one.

    Both take the signal's name.
    """
    reactions = chain([first], repeat(later))

    def react(name: str) -> None:
        next(reactions)(name)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, react, number.name)


HOST_SHARE: Final = 4
"""A denoiser's templates may fill one part in so many of the machine's memory by default."""


def memory_bytes() -> int:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def host_name() -> str:
    """Equal for processes that can share memory: by the kernel's boot id, which containers of one host have, too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


C = TypeVar("C", bound=ServiceConfig)

log = structlog.get_logger(__name__)


def start(service: ServiceName, kind: type[C], main: Callable[[C, asyncio.Event], Awaitable[None]]) -> int:
    """Run `main` with its configuration until SIGTERM or SIGINT sets its `stop` event.

    A second signal ends the process at once. The exit status is 0 after a clean drain, 1 when the service could not
    start or failed.
    """
    config = load(kind, service)
    configure_logs(config.log_level, config.log_format, config.instance)
    try:
        if config.traces_url is None:
            tracing.switch_off()
        else:
            tracing.switch_on(service, config.instance, config.traces_url, config.traces_share)
        uvloop.run(_supervise(partial(main, config)))
    except Exception as error:  # noqa: BLE001 - the process's edge: logged and told by the exit status
        _log_failure(error)
        return 1
    finally:
        tracing.close()
        end_logs()
    return 0


async def _supervise(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()

    def first(name: str) -> None:
        log.info("stopping", signal=name)
        stop.set()

    def second(name: str) -> None:
        log.warning("second_signal", signal=name)
        os._exit(130)  # sys.exit would cancel every task and wait for each, and for every thread

    on_signals(first, second)
    await main(stop)


def _log_failure(error: Exception) -> None:
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            _log_failure(one)
        return
    if isinstance(error, GiornataError):
        log.error("service_failed", code=error.code, error=str(error))
    else:
        log.error("service_failed", error=str(error) or type(error).__name__, exc_info=error)
