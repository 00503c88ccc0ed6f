"""Have NATS servers read their configuration again, by requests to their system account.

A server that reloads lets new users in, gives all users their new rights, and closes the connections of users that are
no longer there. Other connections stay.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import nats.errors

from giornata.bus.connection import FailFastNatsClient, opened
from giornata.deadlines import Deadline
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.permissions import RELOADER

PING: Final = "$SYS.REQ.SERVER.PING"
LIMIT_S: Final = 5.0
"""How long a server may take to let us in, to tell of itself, or to reload."""


async def reload_servers(url: str, password_file: Path) -> int:
    """Reload every server of the cluster that `url` leads to; how many that were.

    A server that is away reads its configuration when it starts.

    Raises:
        ServiceUnavailable: no server answers or lets us in, or a server does not accept its configuration; the others
            have reloaded.
    """
    async with opened(url, RELOADER, RELOADER, password_file, LIMIT_S) as client:
        servers = await _servers(client)
        if not servers:
            raise ServiceUnavailable(
                "No NATS server has told of itself, so that none is known to have reloaded."
            )
        failed = [server for server in servers if not await _reload(client, server)]
    if failed:
        raise ServiceUnavailable(
            f"Of {len(servers)} NATS servers, {len(failed)} did not take the new configuration; their logs say why.",
            received=", ".join(failed),
        )
    return len(servers)


async def _servers(client: FailFastNatsClient) -> list[str]:
    """IDs of the cluster's servers. Each tells how many it knows, so that all are heard; one may just have died."""
    inbox, deadline = client.new_inbox(), Deadline.after_ms(LIMIT_S * 1000)
    heard = await client.subscribe(inbox)
    await client.publish(PING, reply=inbox)
    found: list[str] = []
    expected = 1
    while len(found) < expected:
        try:
            message = await heard.next_msg(timeout=deadline.remaining_s())
        except nats.errors.TimeoutError:
            break
        told: dict[str, Any] = json.loads(message.data)
        found.append(told["server"]["id"])
        expected = max(expected, told["statsz"].get("active_servers", 1))
    await heard.unsubscribe()
    return found


async def _reload(client: FailFastNatsClient, server: str) -> bool:
    """Whether the server has taken its configuration."""
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await client.request(f"$SYS.REQ.SERVER.{server}.RELOAD", timeout=LIMIT_S)
    except (TimeoutError, nats.errors.Error):
        return False
    return "error" not in json.loads(answer.data)
