"""What the work queue delivers to the leader: taken as it comes, and asked for again where some of it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import nats.errors
import structlog
from nats.aio.msg import Msg

from giornata.bus.work_queue import LaterLeaderError, QueueConsumer

AUDIT_S = 30.0
"""How often the queue is asked for messages that were delivered and lost on their way."""
SETTLED_S = 5.0
"""Time in which a message that JetStream has delivered arrives, if it does."""
AGAIN_S = 1.0
"""Time after which a queue that does not answer is asked again."""

log = structlog.get_logger(__name__)


class Deliveries:
    """The jobs of one priority. `take` is given each message, `look` is called after it.

    `arrived` counts the messages up to a sequence number that are held.
    """

    def __init__(
        self,
        consumer: QueueConsumer,
        take: Callable[[Msg], Awaitable[None]],
        look: Callable[[], None],
        arrived: Callable[[int], int],
    ) -> None:
        self._consumer, self._take, self._look, self._arrived = consumer, take, look, arrived
        self.behind = 1
        """Messages that were in the queue when it was taken over, and have not come yet."""
        self.ended = 0
        """Jobs that were acknowledged."""

    def again(self) -> None:
        """Have everything delivered again that is not acknowledged."""
        self._consumer.again()

    async def end(self) -> None:
        """The leader steps down."""
        await self._consumer.end()

    async def consume(self) -> None:
        """Take messages; runs for ever.

        Raises:
            LaterLeaderError: another router has begun to lead.
        """
        while True:
            try:
                self.behind = await self._consumer.begin()
                async with aclosing(self._consumer.messages()) as messages:
                    self._look()
                    async for message in messages:
                        await self._take(message)
                        self.behind -= 1
                        self._look()
            except LaterLeaderError:
                log.warning("later_leader", priority=self._consumer.priority)
                raise
            except nats.errors.Error as error:
                log.warning("queue_unreachable", error=repr(error))
                await asyncio.sleep(AGAIN_S)  # the client is reconnecting; there is nothing to wait on

    async def audit(self) -> None:
        """Have delivered again what was delivered and did not arrive: its server may have died on the way. For ever."""
        while True:
            await asyncio.sleep(AUDIT_S)
            try:
                count, last = await self._consumer.delivered()
            except nats.errors.Error as error:
                log.warning("queue_not_audited", error=repr(error))
                continue
            ended = self.ended
            await asyncio.sleep(SETTLED_S)
            if count > self._arrived(last) + self.ended - ended:
                log.warning("deliveries_lost", priority=self._consumer.priority)
                self._consumer.again()
