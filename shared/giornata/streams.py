"""The JetStream streams and key-value buckets, in one place; every service makes sure of them when it starts."""

from __future__ import annotations

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

from giornata import subjects
from giornata.jobs import Priority

JOBS: Final = "GIORNATA_JOBS"
"""Work queue of accepted jobs; a message lives until its job is terminal."""
EVENTS: Final = "GIORNATA_EVENTS"
"""Events of all jobs, captured from core publishes, for replay."""
RECORDS: Final = "giornata-jobs"
"""Key-value bucket of job records."""
TEMPLATES: Final = "giornata-templates"
"""Key-value bucket of registered templates."""
LEASES: Final = "giornata-leases"
"""Key-value bucket whose entries expire unless renewed."""

RECORD_TTL_S: Final = 24 * 3600
"""Records outlive results, so that an expired result is told from an unknown job."""
TEMPLATE_TTL_S: Final = 31 * 24 * 3600
"""No registration is kept for longer without a use; its own life, which a gateway may be told, is shorter."""
LEASE_TTL_S: Final = 3.0
ACK_WAIT_S: Final = 6.0
"""A router renews its messages well within this; after it, a dead router's jobs go to the next."""
EVENTS_MAX_BYTES: Final = 256 << 20
"""Beyond it the oldest go. Previews are among them, with a share per job: :class:`giornata.events.PreviewEvent`."""


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
        await jetstream.update_stream(config)


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
    for bucket, ttl_s in ((RECORDS, RECORD_TTL_S), (TEMPLATES, TEMPLATE_TTL_S), (LEASES, LEASE_TTL_S)):
        config = KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1, replicas=replicas)
        try:
            await jetstream.create_key_value(config)
        except BadRequestError as error:
            if error.err_code != _STREAM_NAME_IN_USE:
                raise


async def queue_consumer(
    jetstream: JetStreamContext, priority: Priority, *, max_in_flight: int
) -> JetStreamContext.PullSubscription:
    """The durable pull consumer of one priority, shared by every router that is or becomes active.

    An existing one is brought up to date: its limit may be another than when it was made.
    """
    config = ConsumerConfig(
        durable_name=f"router-{priority}",
        filter_subject=subjects.jobs(priority),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=-1,
        max_ack_pending=max_in_flight,
    )
    await jetstream.add_consumer(JOBS, config)
    return await jetstream.pull_subscribe_bind(durable=config.durable_name, stream=JOBS)


_STREAM_NAME_IN_USE: Final = 10058


async def _ensure_stream(jetstream: JetStreamContext, config: StreamConfig) -> bool:
    """Whether the stream was made, or was there with this very configuration."""
    try:
        await jetstream.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True
