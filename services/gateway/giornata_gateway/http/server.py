"""The HTTP door: listening, and its end in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog
from aiohttp import web

from giornata.wire.errors import ServiceUnavailable
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.app import build_app

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""After the drain: how long answers that are being written may still take."""


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Listen while inside; on leaving, answer every request that has come, then close.

    Yields:
        What stops listening and closes the connections on which no request is being answered.

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
    try:
        site = await _site(runner, gateway)
        try:
            yield partial(_stop, gateway, runner, site)
        finally:
            left = await gateway.departure.quiet(config.drain_s + CLOSE_S)
            if left:
                log.warning("requests_left_behind", requests=left)
    finally:
        await runner.cleanup()


async def _site(runner: web.AppRunner, gateway: Gateway) -> web.TCPSite:
    config = gateway.config
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
    log.info("listening", url=f"http://{config.host}:{port}", port=port)
    return site


async def _stop(gateway: Gateway, runner: web.AppRunner, site: web.TCPSite) -> None:
    """Stop as aiohttp does not.

    Its own `pre_shutdown` would read no more of a request whose body is still coming, and would leave the other
    connections open without a handler.
    """
    await site.stop()
    await asyncio.sleep(0)  # as in aiohttp's own clean-up: the requests that have been read begin first
    for connection in runner.server.connections if runner.server is not None else ():
        if connection.transport not in gateway.departure.asking:
            connection.force_close()
