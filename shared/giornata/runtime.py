"""What every process does the same way: logs, uvloop, signals, exit status.

A service's ``main`` opens what it needs on one :class:`~contextlib.AsyncExitStack` and awaits ``stop``. Leaving the
stack is the drain order, last opened first: telemetry says *draining*, endpoints finish what was delivered to
them, work ends, connections drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog
import uvloop

from giornata.config import ServiceConfig, load
from giornata.wire.errors import GiornataError
from giornata.wire.workers import ServiceName

Main = Callable[[asyncio.Event], Awaitable[None]]
C = TypeVar("C", bound=ServiceConfig)

log = structlog.get_logger(__name__)


def start(service: ServiceName, kind: type[C], main: Callable[[C, asyncio.Event], Awaitable[None]]) -> int:
    """Read the configuration of `service` and :func:`run` its `main` with it; the process's exit status."""
    config = load(kind, service)
    return run(partial(main, config), config)


def run(main: Main, config: ServiceConfig) -> int:
    """Run `main` until SIGTERM or SIGINT sets its `stop` event; a second signal ends the process at once.

    Returns:
        Exit status: 0 after a clean drain, 1 when the service could not start or failed.
    """
    configure_logs(config.log_level, config.log_format, config.instance)
    failures: list[Exception] = []
    try:
        uvloop.run(_supervise(main))
    except* Exception as group:  # noqa: BLE001 - the process's edge: logged and told by the exit status
        failures = _flatten(group)
    for error in failures:
        surprise = None if isinstance(error, GiornataError) else error
        log.error("service_failed", error=str(error) or type(error).__name__, exc_info=surprise)
    return 1 if failures else 0


async def _supervise(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stop.is_set():
            log.warning("second_signal", signal=name)
            os._exit(
                130
            )  # not sys.exit: that would cancel every task and wait for each, and for every thread
        log.info("stopping", signal=name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    await main(stop)


def configure_logs(level: str, form: str, instance: str) -> None:
    """structlog to standard error, as lines for people or JSON; every line names the instance."""
    structlog.contextvars.bind_contextvars(instance=instance)
    renderer = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _flatten(group: ExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found += _flatten(error) if isinstance(error, ExceptionGroup) else [error]
    return found
