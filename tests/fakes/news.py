"""Waiting for a fake to have seen something, without polling it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.patience import HUNG_S


class News:
    """Fakes tell that something happened; tests wait until a condition holds, asked again at every telling."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Let everybody who waits look again."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout_s: float = HUNG_S) -> None:
        """Return when `condition` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._next.wait()
