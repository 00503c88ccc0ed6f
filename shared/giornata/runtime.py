"""How every process runs: configuration, logs, uvloop, signals, exit status.

A service's ``main`` opens what it needs on one :class:`~contextlib.AsyncExitStack` and awaits ``stop``. Leaving the
stack drains in order, last opened first: telemetry says *draining*, endpoints finish delivered requests, work ends,
connections drain.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog
import uvloop

from giornata.config import ServiceConfig, load
from giornata.logs import configure_logs, end_logs
from giornata.seeing import spans, switching
from giornata.signals import on_signals
from giornata.wire.errors import GiornataError
from giornata.wire.workers import ServiceName

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
            switching.off()
        else:
            switching.on(service, config.instance, config.traces_url, config.traces_share)
        uvloop.run(_supervise(partial(main, config)))
    except Exception as error:  # noqa: BLE001 - the process's edge: logged and told by the exit status
        _log_failure(error)
        return 1
    finally:
        spans.close()
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
