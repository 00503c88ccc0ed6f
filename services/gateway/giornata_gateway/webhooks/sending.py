"""One attempt: a POST to an address that was looked at when it was connected to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from giornata import __version__
from giornata_gateway.webhooks.rules.addresses import Network, may_connect
from giornata_gateway.webhooks.rules.trying import AT_ONCE

ATTEMPT_S: Final = 15.0
"""From the look-up of a host to the last byte of its answer; Standard Webhooks recommends 15 to 30 s."""
AGENT: Final = {"User-Agent": f"Giornata/{__version__}"}
TYPE: Final = {"Content-Type": "application/json"}


class AddressRefusedError(OSError):
    """This address may not be connected to."""


class WebhookSender:
    """Sends webhooks. Make it with :meth:`open`."""

    def __init__(self, sessions: Mapping[str, aiohttp.ClientSession]) -> None:
        """`sessions` by the scheme that they are for."""
        self._sessions = sessions

    @classmethod
    @asynccontextmanager
    async def open(cls, networks: Sequence[Network]) -> AsyncIterator[WebhookSender]:
        """Connect to public addresses over HTTPS, and to `networks` over either.

        A name is resolved for each attempt, and each address is looked at as its socket is made: there is no second
        look-up by which another address could come (DNS rebinding). No redirect is followed, and no proxy asked.
        """
        async with (
            guarded_session(networks, plain=False) as https,
            guarded_session(networks, plain=True) as http,
        ):
            yield cls({"https": https, "http": http})

    async def send(self, url: str, headers: Mapping[str, str], body: str) -> tuple[int | None, str]:
        """The status of the answer, of which no more is read, and what to tell of it; no status where none came."""
        try:
            http = self._sessions[urlsplit(url).scheme]
            async with http.post(
                url, data=body.encode(), headers={**TYPE, **headers}, allow_redirects=False
            ) as response:
                return response.status, f"status {response.status}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, told(error)


def told(error: Exception) -> str:
    """What to tell of an attempt without an answer: nothing of the addresses that a name leads to."""
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, AddressRefusedError)
        return "the address is not allowed" if refused else "no connection"
    return f"no answer in {ATTEMPT_S:g} s" if isinstance(error, TimeoutError) else type(error).__name__


def guarded_session(networks: Sequence[Network], *, plain: bool) -> aiohttp.ClientSession:
    """Connects to public addresses and to `networks` alone, or, for `plain` HTTP, to `networks` alone.

    It looks at each address as its socket is made, and asks no proxy.
    """
    connector = aiohttp.TCPConnector(
        limit=AT_ONCE,
        force_close=True,
        use_dns_cache=False,
        socket_factory=partial(_socket, networks, plain=plain),
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=ATTEMPT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=AGENT,
        trust_env=False,
    )


def _socket(networks: Sequence[Network], address: tuple[Any, ...], *, plain: bool) -> socket.socket:
    """A socket for one address of :func:`socket.getaddrinfo`; AddressRefusedError where it may not be connected to."""
    family, kind, protocol, _, place = address
    if not may_connect(ipaddress.ip_address(str(place[0]).partition("%")[0]), networks, plain=plain):
        raise AddressRefusedError(f"{place[0]} may not be connected to")
    return socket.socket(family, kind, protocol)
