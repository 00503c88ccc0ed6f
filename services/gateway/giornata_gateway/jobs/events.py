"""The events of a job: kept ones and new ones from its stream, each once and in order, and steps as they are heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from giornata.bus.bus import Bus
from giornata.bus.connection import ask_jetstream
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import Job, JobState
from giornata.wire.messages import EVENT_TYPES, DoneEvent, EventKind, PreviewEvent, StateEvent, StepEvent
from giornata.wire.subjects import EVENTS

log = structlog.get_logger(__name__)

IDLE_HEARTBEAT_S = 5.0
"""How often the server says that a quiet consumer lives. The client restarts a consumer that misses two of them."""
GRACE_S = 1.0
"""How long the stream may lag behind the news that its job has ended."""

ClientEvent = StateEvent | StepEvent | PreviewEvent | DoneEvent
"""The events that clients are told."""


@dataclass(frozen=True)
class StreamedEvent:
    """One event and its place in the stream."""

    event: ClientEvent
    sequence: int | None = None
    """None for a step, which has no place."""
    time: int = 0
    """Unix time in seconds at which the stream took it: the same for every reader at any time."""


class StepEventBuffer:
    """A job's steps since it is listened to, held back until they are :meth:`told`. Make it with :func:`hearing`."""

    def __init__(self) -> None:
        self._early: list[StepEvent] = []
        self._tell: Callable[[StepEvent], None] = self._early.append

    def hear(self, event: StepEvent) -> None:
        """A step has come."""
        self._tell(event)

    def told(self, tell: Callable[[StepEvent], None]) -> None:
        """Tell the steps that were held back, and every one from now on."""
        self._tell, early, self._early = tell, self._early, []
        for event in early:
            tell(event)


@asynccontextmanager
async def hearing(bus: Bus, job_id: str) -> AsyncIterator[StepEventBuffer]:
    """Listen to a job's steps while inside. Nothing keeps them: who is to miss none enters before the job can begin."""
    steps = StepEventBuffer()
    async with bus.listen(subjects.steps_of_job(job_id), StepEvent, steps.hear):
        yield steps


@asynccontextmanager
async def open_feed(
    bus: Bus,
    job_id: str,
    after: int,
    restore: Callable[[], Awaitable[None]],
    heard: StepEventBuffer | None = None,
) -> AsyncIterator[asyncio.Queue[StreamedEvent | None]]:
    """The kept events of a job with a sequence above `after`, then the new ones; and steps.

    Steps are told as they were `heard`, without that from now on. A reader from the beginning hears of them only once
    the stream has told that the job is running.
    The stream lives in memory. Where it is gone, as after a restart of NATS, `restore` makes it again. An ordered
    consumer restarts where the stream was interrupted and may repeat itself; repetitions are dropped here. Only
    readers put None into the queue, to wake themselves.
    """
    told: asyncio.Queue[StreamedEvent | None] = asyncio.Queue()
    last = after

    def step(event: StepEvent) -> None:
        told.put_nowait(StreamedEvent(event))

    async def receive(message: Msg) -> None:
        nonlocal last
        metadata = message.metadata
        sequence = metadata.sequence.stream
        if sequence <= last:
            return
        last = sequence
        event = _event(message)
        if event is None:
            return
        told.put_nowait(StreamedEvent(event, sequence, int(metadata.timestamp.timestamp())))
        if isinstance(event, StateEvent) and event.state is JobState.RUNNING:
            steps.told(step)

    async with hearing(bus, job_id) if heard is None else nullcontext(heard) as steps:
        if after:
            steps.told(step)
        try:
            subscription = await _subscribed(bus, job_id, after, receive)
        except NotFoundError:
            await restore()
            subscription = await _subscribed(bus, job_id, after, receive)
        try:
            yield told
        finally:
            with suppress(nats.errors.Error):  # the connection is going
                await subscription.unsubscribe()


async def _subscribed(
    bus: Bus, job_id: str, after: int, receive: Callable[[Msg], Awaitable[None]]
) -> JetStreamContext.PushSubscription:
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE if after else DeliverPolicy.ALL,
        opt_start_seq=after + 1 if after else None,
    )
    subscribe = partial(
        bus.jetstream.subscribe,
        subjects.events_of_job(job_id),
        stream=EVENTS,
        cb=receive,
        ordered_consumer=True,
        idle_heartbeat=IDLE_HEARTBEAT_S,
        config=config,
    )
    return await ask_jetstream(subscribe)


async def until_done(
    told: asyncio.Queue[StreamedEvent | None],
    ended: asyncio.Future[None],
    heartbeat_s: float,
    deadline: Deadline,
) -> AsyncIterator[StreamedEvent | None]:
    """The events up to the job's last one; None after every quiet `heartbeat_s`.

    Ends without the last event at the deadline, or when `ended` has resolved and the stream does not tell it within
    :data:`GRACE_S`, as after the loss of the stream.
    """
    loop = asyncio.get_running_loop()
    ended.add_done_callback(lambda _: loop.call_later(GRACE_S, told.put_nowait, None))
    while deadline.remaining_s() > 0:
        try:
            async with asyncio.timeout(min(heartbeat_s, deadline.remaining_s())):
                item = await told.get()
        except TimeoutError:
            yield None
            continue
        if item is None:
            return
        yield item
        if isinstance(item.event, DoneEvent):
            return


async def known_sequence(bus: Bus, after: int) -> int:
    """`after`, or 0 where the stream has not come that far: it was made again since, and all of it is news."""
    if not after:
        return 0
    try:
        info = await ask_jetstream(lambda: bus.jetstream.stream_info(EVENTS))
    except NotFoundError:
        return 0
    return after if after <= info.state.last_seq else 0


async def done_sequence(bus: Bus, job: Job) -> int | None:
    """The sequence of the job's last event in the stream; None before it came and after it has expired."""
    subject = subjects.event(job.gateway, job.job_id, EventKind.DONE)
    try:
        message = await ask_jetstream(lambda: bus.jetstream.get_last_msg(EVENTS, subject))
    except NotFoundError:
        return None
    return message.seq


def _event(message: Msg) -> ClientEvent | None:
    """The event in a message; None for what is not for clients, for steps, and for what cannot be read.

    A stream that an older version made keeps steps, too; they are heard as they happen.
    """
    try:
        event = codec.decode(EVENT_TYPES[EventKind(message.subject.rpartition(".")[2])], message.data)
    except (GiornataError, ValueError) as error:
        log.warning("event_dropped", subject=message.subject, error=str(error))
        return None
    return event if isinstance(event, ClientEvent) and not isinstance(event, StepEvent) else None
