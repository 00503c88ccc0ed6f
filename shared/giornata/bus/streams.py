"""The JetStream streams and key-value buckets; every service makes sure of them when it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError

from giornata.retries import COMING_UP_S, repeated
from giornata.wire import stores, subjects
from giornata.wire.events import KEPT
from giornata.wire.jobs import Priority

LEASE_TTL_S: Final = 3.0
BUCKET_TTL_S: Final = {
    stores.RECORDS: 24 * 3600,  # outlives results, so that an expired result is told from an unknown job
    stores.TEMPLATES: 31 * 24 * 3600,  # of an unused one; gateways may be configured for a shorter life
    stores.QUARANTINE: 7 * 24 * 3600,
    stores.LEASES: LEASE_TTL_S,
}
ACK_WAIT_S: Final = 6.0
"""A router renews its messages well within this time; after it, a dead router's jobs go to the next router."""
_STREAM_NAME_IN_USE: Final = 10058
"""JetStream's error code."""
KEPT_EVENTS: Final = tuple(map(subjects.events_of_kind, KEPT))
"""What the event stream captures."""
EVENTS_MAX_BYTES: Final = 256 << 20
"""Beyond it the oldest events go. Previews have a share per job: see `PreviewEvent`."""


async def ensure_queue(jetstream: JetStreamContext, *, replicas: int, queue_limit: int) -> None:
    """Create the work queue, or bring its limit of unfinished jobs up to date. Only routers do this."""
    config = StreamConfig(
        name=stores.JOBS,
        subjects=[subjects.ALL_JOBS],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=queue_limit,
        num_replicas=replicas,
    )
    if not await _made(partial(jetstream.add_stream, config)):
        await repeated(partial(jetstream.update_stream, config))


async def ensure(jetstream: JetStreamContext, *, replicas: int, events_ttl_s: float) -> None:
    """Create the event stream, which keeps events for `events_ttl_s`, and the buckets that do not exist yet."""
    events = StreamConfig(
        name=stores.EVENTS,
        subjects=list(KEPT_EVENTS),
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_age=events_ttl_s,
        max_bytes=EVENTS_MAX_BYTES,
        num_replicas=replicas,
    )
    await _made(partial(jetstream.add_stream, events))
    for bucket, ttl_s in BUCKET_TTL_S.items():
        config = KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1, replicas=replicas)
        await _made(partial(jetstream.create_key_value, config))


async def renew(jetstream: JetStreamContext, *, replicas: int) -> None:
    """Bring existing streams up to date. Only routers do this.

    They are spread over `replicas` servers, never over fewer than now: a deployment that began with one server then
    goes on with three. The event stream of an older version captured steps, too.
    """
    for name in stores.STREAMS:
        config = (await repeated(partial(jetstream.stream_info, name))).config
        wanted = config.evolve(num_replicas=max(replicas, config.num_replicas or 1))
        if name == stores.EVENTS:
            wanted = wanted.evolve(subjects=list(KEPT_EVENTS))
        if wanted != config:
            await repeated(partial(jetstream.update_stream, wanted))


async def queue_consumer(
    jetstream: JetStreamContext, priority: Priority, *, max_in_flight: int
) -> JetStreamContext.PullSubscription:
    """The durable pull consumer of one priority, shared by every router that is or becomes active.

    An existing consumer is brought up to date, since its limit may have changed.
    """
    config = ConsumerConfig(
        durable_name=stores.queue_consumer_name(priority),
        filter_subject=subjects.jobs(priority),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=-1,
        max_ack_pending=max_in_flight,
    )
    await repeated(partial(jetstream.add_consumer, stores.JOBS, config))
    return await jetstream.pull_subscribe_bind(durable=config.durable_name, stream=stores.JOBS)


async def _made(make: Callable[[], Awaitable[object]]) -> bool:
    """Whether `make` succeeded, or would have made what exists; False if it exists with another configuration."""
    try:
        await repeated(make, COMING_UP_S)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True
