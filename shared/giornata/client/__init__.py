"""Giornata from another application, over NATS: submit an edit, watch it, wait for it, cancel it.

Example::

    async with giornata.client.connect("nats://127.0.0.1:4222") as client:
        edit = await client.edit(image=photo, mask=mask, prompt="a red star")
        async for progress in edit:
            print(progress)
        result = await edit
        pathlib.Path("edited.png").write_bytes(result.pictures[0].data)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.client.connection import Client
from giornata.client.edit import Edit, EditedPicture, EditResult, Progress

__all__ = ["Client", "Edit", "EditResult", "EditedPicture", "Progress", "connect"]


@asynccontextmanager
async def connect(
    url: str,
    *,
    redis_url: str | None = None,
    api_key: str | None = None,
    tenant: str = "default",
    name: str = "client",
) -> AsyncIterator[Client]:
    """A client, connected while inside.

    Args:
        url: NATS server(s), comma-separated.
        redis_url: blob store of the deployment; needed for pictures above 6 MiB.
        api_key: if the gateways ask for one.
        tenant: the key's; names the place of uploads in the blob store.
        name: of this application, in the server's list of connections.

    Raises:
        ServiceUnavailable: no server answers.
    """
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(url, name))
        blobs = await stack.enter_async_context(RedisBlobs.open(redis_url)) if redis_url else None
        client = Client(connected, blobs, api_key, tenant)
        await stack.enter_async_context(client.listening())
        yield client
