"""A server of OpenAI's image API whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Respond = Callable[["Asked"], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    """One request, as it came."""

    number: int
    """0 for the first."""
    fields: dict[str, str]
    files: dict[str, bytes]
    authorization: str | None
    transport: asyncio.Transport

    @property
    def n(self) -> int:
        return int(self.fields["n"])


@dataclass
class ImagesServer:
    """What came, and how it is answered."""

    respond: Respond
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, count: int) -> None:
        """Until so many requests have come."""
        async with self.came:
            await self.came.wait_for(lambda: len(self.asked) >= count)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        files = {name: part.file.read() for name, part in form.items() if isinstance(part, web.FileField)}
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        assert isinstance(request.transport, asyncio.Transport)
        key = request.headers.get("Authorization")
        async with self.came:
            asked = Asked(len(self.asked), fields, files, key, request.transport)
            self.asked.append(asked)
            self.came.notify_all()
        return await self.respond(asked)


def pictures(count: int, **extra: Any) -> web.Response:
    """A success."""
    return web.json_response({"created": 0, "data": [{"b64_json": "eA=="}] * count, **extra})


def refused(status: int, code: str, message: str = "no") -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


async def at_once(asked: Asked) -> web.Response:
    """As many pictures as were asked for."""
    return pictures(asked.n)


@asynccontextmanager
async def images_server(respond: Respond = at_once) -> AsyncIterator[ImagesServer]:
    """Listening while inside; handlers that still wait then are ended."""
    server = ImagesServer(respond)
    app = web.Application()
    app.router.add_post("/v1/images/edits", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
