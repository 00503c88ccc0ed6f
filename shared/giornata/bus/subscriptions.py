"""Subscriptions in order: in force before work is asked for, drained before a connection or service ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from giornata.bus.connection import TellingClient
from giornata.wire.errors import NotPermitted

log = structlog.get_logger(__name__)


@asynccontextmanager
async def drained_tasks() -> AsyncIterator[tuple[asyncio.TaskGroup, AsyncExitStack]]:
    """A task group that outlives the subscriptions that feed it: they are drained, then the tasks awaited."""
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        yield tasks, stack


async def barrier(client: Client) -> None:
    """Return when the server has processed every command given before: subscriptions are in force, or gone.

    The client's own `flush` writes its PING at once, ahead of commands that its flusher task has yet to write; before
    the second PING they are written.
    """
    await client.flush()
    await client.flush()


async def in_force(client: TellingClient, *subscribed: str) -> None:
    """Return when the server has taken the subscriptions; NotPermitted if it has refused one."""
    await barrier(client)
    for subject in subscribed:
        if not client.may_listen(subject):
            raise NotPermitted(received=subject)


async def drain(client: Client, subscription: Subscription) -> None:
    """Take in the delivered messages and no others; without a connection there are none to wait for."""
    try:
        if client.is_connected:
            # The library's drain would believe its overtaking flush, and drop what arrives in between.
            await client._send_unsubscribe(subscription._id)  # noqa: SLF001 - `unsubscribe` would drop what was delivered
            await barrier(client)
            await subscription.drain()  # type: ignore[no-untyped-call]  # nats-py annotates it in part
        else:
            await subscription.unsubscribe()
    except nats.errors.Error as error:
        log.warning("subscription_not_drained", subject=subscription.subject, error=repr(error))


async def drain_service(client: Client, service: Any) -> None:
    """Take in the delivered requests of a micro service and end it; `Service.stop` alone would drop these."""
    endpoints: Sequence[Any] = service._endpoints  # noqa: SLF001 - nats.micro has no drain
    await asyncio.gather(*(drain(client, endpoint._subscription) for endpoint in endpoints))  # noqa: SLF001 - as above
    service._endpoints = []  # noqa: SLF001 - so that stop() does not unsubscribe them again
    with contextlib.suppress(nats.errors.Error):  # a closed connection has no service
        await service.stop()
