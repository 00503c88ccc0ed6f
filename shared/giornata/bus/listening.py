"""When a subscription is up to date, and the clock that counts the time over which it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import nats.errors
from nats.aio.subscription import Subscription

from giornata.bus.connection import FailFastNatsClient
from giornata.fleet import ListeningClock

LOOK_S: Final = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""


class TrackedSubscription:
    """A subscription whose messages are handled one after another; :meth:`giornata.bus.bus.Bus.listen` makes it."""

    def __init__(self, client: FailFastNatsClient) -> None:
        self._client = client
        self.subscription: Subscription | None = None
        """None until it is made."""
        self._handled = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def handled(self) -> None:
        """One more message has been handled."""
        self._handled += 1
        for target, future in self._waiting:
            if target <= self._handled and not future.done():
                future.set_result(None)

    async def caught_up(self) -> None:
        """Return when every message that had reached the server before the call is handled, later ones or not.

        Raises:
            LostError: the connection is lost.
        """
        await self._client.received()
        target = self._handled + (self.subscription.pending_msgs if self.subscription else 0)
        if target == self._handled:
            return
        entry = target, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)


async def keep_looking(
    listening: TrackedSubscription, clock: ListeningClock, look: Callable[[], None]
) -> None:
    """For ever, tick `clock` when all that came before is handled, and then `look`.

    A process that lags ticks as much later, so that it looks at what it knew at that time. A backlog that never empties
    holds up no tick: a tick waits for earlier messages only. Time without a connection does not count.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        try:
            await listening.caught_up()
        except nats.errors.Error:
            clock.pause()
        else:
            clock.tick(now)
        look()
