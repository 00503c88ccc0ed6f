"""A gateway's departure without a lost request: it says so, sends watchers elsewhere, and answers the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

T = TypeVar("T")

SWALLOWED_S: Final = 0.2
"""A cancellation that has done nothing for so long was lost."""


class GracefulShutdown:
    """Announced once, then begun once; counts the HTTP requests that are still to be answered."""

    def __init__(self) -> None:
        self.announced = asyncio.Event()
        """The gateway is not ready any more, and each answer closes its connection. It still takes requests."""
        self.begun = asyncio.Event()
        """No request comes any more. Requests that any gateway can serve are answered at once."""
        self.asking: Counter[asyncio.BaseTransport] = Counter()
        """Connections on which a request is being answered."""
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def answering(self, connection: asyncio.BaseTransport) -> Iterator[None]:
        """Count a request while inside: from its head to its answer."""
        self.asking[connection] += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self.asking -= Counter([connection])
            if not self.asking:
                self._quiet.set()

    async def quiet(self, limit_s: float) -> int:
        """Wait until no request is being answered, at most `limit_s`; how many are left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        return self.asking.total()

    async def before(self, work: Awaitable[T]) -> T | None:
        """Return what `work` returns; None where this gateway begins to leave first, which cancels `work`."""
        working = asyncio.ensure_future(work)
        begun = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait([working, begun], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            begun.cancel()
            # Repeated, since Python 3.11's wait_for, which nats-py uses, may swallow a cancellation.
            while not working.done():
                working.cancel()
                await asyncio.wait([working], timeout=SWALLOWED_S)
