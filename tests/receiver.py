"""A receiver of webhooks, which answers as a test tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.patience import HUNG_S


@dataclass
class Heard:
    """One attempt."""

    headers: dict[str, str]
    body: str

    @property
    def told(self) -> dict[str, Any]:
        """The body as JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Receiver:
    """Answers as told: `answers` one after the other, then 204."""

    url: str = ""
    answers: list[web.Response] = field(default_factory=list)
    heard: asyncio.Queue[Heard] = field(default_factory=asyncio.Queue)

    async def take(self, request: web.Request) -> web.Response:
        """Answer an attempt."""
        self.heard.put_nowait(Heard(dict(request.headers), await request.text()))
        return self.answers.pop(0) if self.answers else web.Response(status=204)

    async def next(self) -> Heard:
        """The next attempt, waited for."""
        return await asyncio.wait_for(self.heard.get(), HUNG_S)


@asynccontextmanager
async def receiving(host: str = "127.0.0.1") -> AsyncIterator[Receiver]:
    """A receiver at a free port of this address of the machine, while inside."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    app.router.add_post("/elsewhere", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    receiver.url = f"http://{host}:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()
