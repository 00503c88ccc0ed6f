"""The HTTP door: listening, and its end in order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog
from aiohttp import web

from giornata.wire.errors import ServiceUnavailable
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.app import build_app

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""After the drain: how long answers that are being written may still take."""


@dataclass(frozen=True)
class HttpServer:
    """The HTTP door, open. Make it with :func:`listening`."""

    gateway: Gateway
    runner: web.AppRunner
    site: web.TCPSite

    async def stop(self) -> None:
        """Listen no more, and close the connections on which no request is being answered.

        aiohttp's own `pre_shutdown` would read no more of a request whose body is still coming, and would leave the
        other connections open without a handler.
        """
        await self.site.stop()
        await asyncio.sleep(0)  # as in aiohttp's own clean-up: the requests that have been read begin first
        for connection in self.runner.server.connections if self.runner.server is not None else ():
            if connection.transport not in self.gateway.departure.asking:
                connection.force_close()


async def listening(gateway: Gateway, stack: AsyncExitStack) -> HttpServer:
    """Listen; when `stack` closes, answer every request that has come, then close.

    Raises:
        ServiceUnavailable: the address cannot be listened on.
    """
    config = gateway.config
    runner = web.AppRunner(
        build_app(gateway),
        handler_cancellation=True,
        shutdown_timeout=CLOSE_S,
        access_log=None,
        auto_decompress=False,  # a small body that unpacks to a large one is refused, see multipart
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        raise ServiceUnavailable(
            f"The address {config.host}:{config.port} cannot be listened on: {error}."
        ) from error
    port = int(runner.addresses[0][1])
    if config.port_file is not None:
        config.port_file.write_text(f"{port}\n")
    stack.push_async_callback(_answer_all, gateway)
    log.info("listening", url=f"http://{config.host}:{port}", port=port)
    return HttpServer(gateway, runner, site)


async def _answer_all(gateway: Gateway) -> None:
    left = await gateway.departure.quiet(gateway.config.drain_s + CLOSE_S)
    if left:
        log.warning("requests_left_behind", requests=left)
