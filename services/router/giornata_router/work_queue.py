"""Every message of the work queue, delivered to the router that leads.

A consumer belongs to one leader and has the leader's epoch in its name. JetStream lets no two consumers of a work queue
have the same subject, so a new leader deletes the one of an earlier leader. Everything unacknowledged then comes again,
at once. An earlier leader that wakes up late finds a consumer of a later epoch and stops; what it acknowledges goes to
a consumer that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NotFoundError

from giornata.bus.bus import Bus
from giornata.retries import ask_jetstream
from giornata.wire import subjects
from giornata.wire.jobs import Priority
from giornata.wire.messages import Epoch

PULL_S: Final = 5.0
"""A pull waits this long: a restarted server forgets it without a word."""
PULLED: Final = 2048
"""Messages of one pull."""
ACK_WAIT_S: Final = 7 * 24 * 3600.0
"""Longer than any edit may take. What is not acknowledged comes again when the consumer is made again."""
UNUSED_S: Final = 300.0
"""JetStream deletes a consumer that was not used for so long."""
ACKNOWLEDGED_S: Final = 2.0
"""Limit of one acknowledgement."""
NAMED_S: Final = 5.0
"""Limit of one question for the consumers' names."""
LEFT_S: Final = 0.5
"""A leader that steps down tries no longer than this to delete its consumer."""
_NOT_UNIQUE: Final = 10100
"""JetStream's error code: another consumer has the subject."""
_TRIES: Final = 5
_ALIVE, _NOTHING, _EXPIRED = "100", "404", "408"
"""Statuses: a heartbeat, no message, the pull's time is over."""
AUDIT_S = 30.0
"""How often the queue is asked for messages that were delivered and lost on their way."""
SETTLED_S = 5.0
"""Time in which a message that JetStream has delivered arrives, if it does."""
AGAIN_S = 1.0
"""Time after which a queue that does not answer is asked again."""

log = structlog.get_logger(__name__)


class LaterLeaderError(nats.errors.Error):
    """A router that began to lead later has taken the queue over."""


class QueueConsumer:
    """Delivers the jobs of one priority to the leader of an epoch. They are held until they are acknowledged."""

    def __init__(self, bus: Bus, priority: Priority, epoch: Epoch) -> None:
        self._client, self._jetstream = bus.client, bus.jetstream
        self._subject, self._priority, self._epoch = subjects.jobs(priority), priority, epoch
        self._name = subjects.queue_consumer_name(priority, epoch)
        self._news = asyncio.Queue[Msg | None]()
        self.behind = 1
        """Messages that were in the queue when it was taken over, and have not come yet."""
        self.ended = 0
        """Jobs that were acknowledged."""

    async def consume(self, take: Callable[[Msg], Awaitable[None]], look: Callable[[], None]) -> None:
        """Give `take` each message, and call `look` after it; runs for ever.

        Raises:
            LaterLeaderError: another router has begun to lead.
        """
        while True:
            try:
                self.behind = await self.begin()
                async with aclosing(self.messages()) as messages:
                    look()
                    async for message in messages:
                        await take(message)
                        self.behind -= 1
                        look()
            except LaterLeaderError:
                log.warning("later_leader", priority=self._priority)
                raise
            except nats.errors.Error as error:
                log.warning("queue_unreachable", error=repr(error))
                await asyncio.sleep(AGAIN_S)  # the client is reconnecting; there is nothing to wait on

    async def audit(self, arrived: Callable[[int], int]) -> None:
        """Have delivered again what was delivered and did not arrive: its server may have died on the way. For ever.

        `arrived` counts the messages up to a sequence number that are held.
        """
        while True:
            await asyncio.sleep(AUDIT_S)
            try:
                count, last = await self.delivered()
            except nats.errors.Error as error:
                log.warning("queue_not_audited", error=repr(error))
                continue
            ended = self.ended
            await asyncio.sleep(SETTLED_S)
            if count > arrived(last) + self.ended - ended:
                log.warning("deliveries_lost", priority=self._priority)
                self.again()

    async def begin(self) -> int:
        """Take the queue over: make the consumer in place of earlier ones, its own among them.

        Returns how many messages are to come.

        Raises:
            LaterLeaderError: it belongs to a later leader.
        """
        config = ConsumerConfig(
            durable_name=self._name,
            filter_subject=self._subject,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=-1,
            inactive_threshold=UNUSED_S,
        )
        for _ in range(_TRIES):
            await self._delete_earlier()
            try:
                info = await ask_jetstream(partial(self._jetstream.add_consumer, subjects.JOBS, config))
            except APIError as error:
                if error.err_code != _NOT_UNIQUE:
                    raise
            else:
                return info.num_pending or 0
        raise LaterLeaderError

    async def _delete_earlier(self) -> None:
        for name in await ask_jetstream(self._names):
            epoch = subjects.queue_consumer_epoch(name, self._priority)
            if epoch is None:
                continue
            if epoch > self._epoch:
                raise LaterLeaderError
            with contextlib.suppress(NotFoundError):
                await ask_jetstream(partial(self._jetstream.delete_consumer, subjects.JOBS, name))

    async def _names(self) -> list[str]:
        """The queue's consumers, also those without a leader, which a list of their states lacks."""
        answer = await self._client.request(f"$JS.API.CONSUMER.NAMES.{subjects.JOBS}", timeout=NAMED_S)
        told = json.loads(answer.data)
        if "error" in told:
            raise APIError.from_error(told["error"])
        return list(told.get("consumers") or ())

    async def messages(self) -> AsyncGenerator[Msg, None]:
        """Messages as they come, each once, until :meth:`again`.

        Raises:
            nats.errors.Error: JetStream does not know the consumer, or has no leader for it.
        """
        news = self._news = asyncio.Queue[Msg | None]()
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=news.put)
        try:
            while True:
                asked = {"batch": PULLED, "expires": int(PULL_S * 1e9)}
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.JOBS}.{self._name}"
                await self._client.publish(subject, json.dumps(asked).encode(), reply=inbox)
                for _ in range(PULLED):
                    try:
                        async with asyncio.timeout(PULL_S + 1):
                            message = await news.get()
                    except TimeoutError:
                        break
                    status = message.headers.get("Status") if message and message.headers else None
                    if status in {_NOTHING, _EXPIRED}:
                        break
                    if message is None:
                        return
                    if status is None:
                        yield message
                    elif status != _ALIVE:
                        raise nats.errors.Error(f"nats: {self._name}: {status}")
        finally:
            with contextlib.suppress(nats.errors.Error):  # without a connection there is nothing to end
                await subscription.unsubscribe()

    def again(self) -> None:
        """End :meth:`messages`: some may have been lost on their way."""
        self._news.put_nowait(None)

    async def delivered(self) -> tuple[int, int]:
        """Return how many messages are delivered and unacknowledged, and the sequence number of the last one."""
        info = await ask_jetstream(partial(self._jetstream.consumer_info, subjects.JOBS, self._name))
        return info.num_ack_pending or 0, info.delivered.stream_seq if info.delivered else 0

    async def end(self) -> None:
        """Leave the queue to the next leader, which may be of an older version that knows no epochs."""
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                async with asyncio.timeout(LEFT_S):
                    await self._jetstream.delete_consumer(subjects.JOBS, self._name)


async def acknowledge(client: Client, reply: str) -> None:
    """Take a message out of the queue, and return when it is out."""
    await client.request(reply, b"+ACK", timeout=ACKNOWLEDGED_S)
