"""The JetStream streams and key-value buckets, in one place; every service makes sure of them when it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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

from giornata.bus.patience import COMING_UP_S, repeated
from giornata.wire import subjects
from giornata.wire.jobs import Priority
from giornata.wire.stores import (
    BUCKETS,
    EVENTS,
    JOBS,
    LEASES,
    QUARANTINE,
    RECORDS,
    TEMPLATES,
    bucket_stream,
    queue_consumer_name,
)

RECORD_TTL_S: Final = 24 * 3600
"""Records outlive results, so that an expired result is told from an unknown job."""
TEMPLATE_TTL_S: Final = 31 * 24 * 3600
"""No registration is kept for longer without a use; its own life, which a gateway may be told, is shorter."""
QUARANTINE_TTL_S: Final = 7 * 24 * 3600
LEASE_TTL_S: Final = 3.0
ACK_WAIT_S: Final = 6.0
"""A router renews its messages well within this; after it, a dead router's jobs go to the next."""
EVENTS_MAX_BYTES: Final = 256 << 20
"""Beyond it the oldest go. Previews are among them, with a share per job: see `PreviewEvent`."""


async def ensure_queue(jetstream: JetStreamContext, *, replicas: int, queue_limit: int) -> None:
    """Create the work queue, or bring its limit up to date. The router's business alone.

    Args:
        jetstream: of a connected client.
        replicas: JetStream replicas, 1 or the size of the cluster.
        queue_limit: jobs that may be accepted and unfinished at a time; more are refused.
    """
    config = StreamConfig(
        name=JOBS,
        subjects=[subjects.ALL_JOBS],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=queue_limit,
        num_replicas=replicas,
    )
    if not await _ensure_stream(jetstream, config):
        await repeated(lambda: jetstream.update_stream(config))


async def ensure(jetstream: JetStreamContext, *, replicas: int, events_ttl_s: float) -> None:
    """Create the event stream and the buckets where they do not exist yet. Every service may be the first.

    Args:
        jetstream: of a connected client.
        replicas: JetStream replicas, 1 or the size of the cluster.
        events_ttl_s: how long events can be replayed.
    """
    await _ensure_stream(
        jetstream,
        StreamConfig(
            name=EVENTS,
            subjects=[subjects.ALL_EVENTS],
            storage=StorageType.MEMORY,
            discard=DiscardPolicy.OLD,
            max_age=events_ttl_s,
            max_bytes=EVENTS_MAX_BYTES,
            num_replicas=replicas,
        ),
    )
    lives = {
        RECORDS: RECORD_TTL_S,
        TEMPLATES: TEMPLATE_TTL_S,
        QUARANTINE: QUARANTINE_TTL_S,
        LEASES: LEASE_TTL_S,
    }
    for bucket, ttl_s in lives.items():
        config = KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1, replicas=replicas)
        await _made(lambda config=config: jetstream.create_key_value(config))  # type: ignore[misc]  # bound per turn


async def replicate(jetstream: JetStreamContext, *, replicas: int) -> None:
    """Keep what exists on `replicas` servers, where it is on fewer; never on fewer than it is. The router's business.

    So that a deployment which was begun with one server goes on with three.
    """
    for name in (EVENTS, *(bucket_stream(bucket) for bucket in BUCKETS)):
        info = await repeated(lambda name=name: jetstream.stream_info(name))  # type: ignore[misc]  # bound per turn
        if (info.config.num_replicas or 1) < replicas:
            config = info.config.evolve(num_replicas=replicas)
            await repeated(lambda config=config: jetstream.update_stream(config))  # type: ignore[misc]  # bound per turn


async def queue_consumer(
    jetstream: JetStreamContext, priority: Priority, *, max_in_flight: int
) -> JetStreamContext.PullSubscription:
    """The durable pull consumer of one priority, shared by every router that is or becomes active.

    An existing one is brought up to date: its limit may be another than when it was made.
    """
    config = ConsumerConfig(
        durable_name=queue_consumer_name(priority),
        filter_subject=subjects.jobs(priority),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=-1,
        max_ack_pending=max_in_flight,
    )
    await repeated(lambda: jetstream.add_consumer(JOBS, config))
    return await jetstream.pull_subscribe_bind(durable=config.durable_name, stream=JOBS)


_STREAM_NAME_IN_USE: Final = 10058


async def _ensure_stream(jetstream: JetStreamContext, config: StreamConfig) -> bool:
    """Whether the stream was made, or was there with this very configuration."""
    return await _made(lambda: jetstream.add_stream(config))


async def _made(make: Callable[[], Awaitable[object]]) -> bool:
    """Whether `make` made it, or it was there alike; False where it is there otherwise."""
    try:
        await repeated(make, COMING_UP_S)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True
