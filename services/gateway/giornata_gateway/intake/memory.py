"""How many bytes of pictures this gateway holds at a time: uploads are refused above the limit, answers wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from giornata.wire.errors import ServiceUnavailable, TooManyRequests

RETRY_AFTER_S: Final = 2.0
ROOM_S: Final = 30.0
"""How long an answer waits for room."""

Grow = Callable[[int], None]
"""Counts a number of further bytes; TooManyRequests where there is no room."""


class Memory:
    """Counts bytes against a limit. Answers that wait are let in first come, first served."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextmanager
    def growing(self) -> Iterator[Grow]:
        """Hold what is counted, piece by piece as it arrives, while inside. It refuses and never waits."""
        held = 0

        def grow(size_bytes: int) -> None:
            nonlocal held
            if self.held_bytes + size_bytes > self.limit_bytes:
                raise TooManyRequests(
                    "Too many pictures are being received; try again later.", retry_after_s=RETRY_AFTER_S
                )
            self.held_bytes += size_bytes
            held += size_bytes

        try:
            yield grow
        finally:
            self._free(held)

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold `size_bytes` while inside, once there is room; more than the limit fits when nothing else is held.

        ServiceUnavailable is raised where there is none within :data:`ROOM_S`.
        """
        try:
            async with asyncio.timeout(ROOM_S), self._turn:
                while self.held_bytes and self.held_bytes + size_bytes > self.limit_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self.held_bytes += size_bytes
        except TimeoutError as error:
            raise ServiceUnavailable(
                "Too many answers are being read; fetch the pictures later.", retry_after_s=RETRY_AFTER_S
            ) from error
        try:
            yield
        finally:
            self._free(size_bytes)

    def _free(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._freed.set()
