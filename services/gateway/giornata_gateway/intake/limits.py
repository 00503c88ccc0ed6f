"""What this gateway holds at a time: pictures in progress, open event streams, and bytes of pictures.

An edit holds as many places as it has pictures, from the moment its request is read until its job has ended; an
asynchronous job only until it is accepted, since from there on the router's queue limit counts it. A request that is
still being received holds no places, so that a slow client keeps no other client out; its bytes are counted. Uploads
are refused above the limit of bytes, answers wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from giornata.wire.errors import ServiceUnavailable, TooManyRequests

SMOOTHING: Final = 0.2
"""Weight of the latest edit in the running mean of how long a picture takes."""
RETRY_AFTER_S: Final = 2.0
ROOM_S: Final = 30.0
"""How long an answer waits for room."""

Grow = Callable[[int], None]
"""Counts a number of further bytes; TooManyRequests where there is no room."""


@dataclass
class Stay:
    """What becomes of a request while it holds its places."""

    seconds: float | None = None
    """How long the edit took, once it was carried out; None leaves the running mean as it is."""
    lasting: bool = False
    """The tenant's pictures count as in progress until the job's end is heard, not only while the places are held."""
    repeated: bool = False
    """The job was accepted for an earlier request with the same idempotency key."""


class Places:
    """Counts places against a limit. One request of any size fits into an idle gateway."""

    def __init__(self, limit: int, what: str = "pictures") -> None:
        self.limit = limit
        self.what = what
        self.taken = 0
        """Places taken now."""
        self.closed = False
        """Draining: nothing more is admitted."""
        self._seconds_each = 1.0

    def check(self, places: int = 1) -> None:
        """Raise TooManyRequests while there is no room, saying when there may be; ServiceUnavailable once closed."""
        if self.closed:
            raise ServiceUnavailable("This gateway is shutting down.", retry_after_s=1)
        if self.taken and self.taken + places > self.limit:
            raise TooManyRequests(
                received=f"{places} {self.what} while {self.taken} are in progress",
                accepted=f"{self.limit} {self.what} at a time",
                retry_after_s=self.estimate_s(self.taken + places - self.limit, self.limit),
            )

    @contextmanager
    def held(self, places: int = 1) -> Iterator[Stay]:
        """Hold places while inside; raises as :meth:`check`."""
        self.check(places)
        self.taken += places
        stay = Stay()
        try:
            yield stay
        finally:
            self.taken -= places
            if stay.seconds is not None:
                self._seconds_each += SMOOTHING * (stay.seconds / places - self._seconds_each)

    def estimate_s(self, pictures: int, at_a_time: int) -> float:
        """Whole seconds, at least 1, until `pictures` should be done, `at_a_time` at once, as the latest edits took."""
        return float(max(1, math.ceil(self._seconds_each * pictures / at_a_time)))


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
