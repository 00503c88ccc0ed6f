"""What stands in front of several gateways: it looks which are ready, and sends each request to one of those."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

CHECK_S = 0.5
"""Between two looks at every gateway: in between the balancer does not know that one leaves."""


class Balancer:
    """Round robin over gateways that were ready when they were last looked at. Make it with :func:`balancing`.

    A connection that is refused costs a request nothing: it goes to the next gateway. A connection that is closed under
    a request, or any answer, is the request's own.
    """

    def __init__(self, gateways: Callable[[], list[str]], http: aiohttp.ClientSession) -> None:
        self._gateways = gateways
        self._http = http
        self._ready: list[str] = []
        self._turns = itertools.count()

    async def check(self) -> None:
        """Look which gateways are ready."""
        urls = self._gateways()
        states = await asyncio.gather(*map(self._is_ready, urls))
        self._ready = [url for url, ready in zip(urls, states, strict=True) if ready]

    async def _is_ready(self, url: str) -> bool:
        try:
            async with self._http.get(f"{url}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def watch(self) -> None:
        """Look again and again; runs for ever."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_S)  # what a balancer does, not a poll of the test

    @asynccontextmanager
    async def request(
        self, method: str, path: str, form: Callable[[], aiohttp.FormData] | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, sent to one gateway; `form` makes its body, which each try needs anew."""
        async with await self._sent(method, path, form, options) as answer:
            yield answer

    async def _sent(
        self, method: str, path: str, form: Callable[[], aiohttp.FormData] | None, options: dict[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        for url in self._by_turns():
            body = None if form is None else form()
            try:
                return await self._http.request(method, f"{url}{path}", data=body, **options)
            except aiohttp.ClientConnectorError:
                continue
        raise AssertionError(f"no gateway takes {method} {path}")

    def _by_turns(self) -> list[str]:
        first = next(self._turns) % max(1, len(self._ready))
        return self._ready[first:] + self._ready[:first]


@asynccontextmanager
async def balancing(
    gateways: Callable[[], list[str]], headers: Mapping[str, str] | None = None
) -> AsyncIterator[Balancer]:
    """A balancer over `gateways()`, the addresses of those that there are; `headers` go with every request."""
    async with aiohttp.ClientSession(headers=headers) as http, asyncio.TaskGroup() as tasks:
        balancer = Balancer(gateways, http)
        await balancer.check()
        watching = tasks.create_task(balancer.watch(), name="balancer")
        try:
            yield balancer
        finally:
            watching.cancel()
