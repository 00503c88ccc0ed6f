"""The JetStream streams and key-value buckets; every service makes sure of them when it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError

from giornata.retries import COMING_UP_S, repeated
from giornata.wire import stores, subjects

LEASE_TTL_S: Final = 3.0
BUCKET_TTL_S: Final = {
    stores.RECORDS: 24 * 3600,  # outlives results, so that an expired result is told from an unknown job
    stores.TEMPLATES: 31 * 24 * 3600,  # of an unused one; gateways may be configured for a shorter life
    stores.QUARANTINE: 7 * 24 * 3600,
    stores.LEASES: LEASE_TTL_S,
}
_STREAM_NAME_IN_USE: Final = 10058
"""JetStream's error code."""
EVENTS_MAX_BYTES: Final = 256 << 20
"""Beyond it the oldest events go. Previews have a share per job: see `PreviewEvent`."""


async def ensure_queue(jetstream: JetStreamContext, *, replicas: int, max_messages: int) -> None:
    """Create the work queue, or bring the number of messages that it takes up to date. Only routers do this."""
    config = StreamConfig(
        name=stores.JOBS,
        subjects=[subjects.ALL_JOBS],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=max_messages,
        num_replicas=replicas,
    )
    if not await _made(partial(jetstream.add_stream, config)):
        await repeated(partial(jetstream.update_stream, config))


async def ensure(jetstream: JetStreamContext, *, replicas: int, events_ttl_s: float) -> None:
    """Create the event stream, which keeps events for `events_ttl_s`, and the buckets that do not exist yet."""
    events = StreamConfig(
        name=stores.EVENTS,
        subjects=[subjects.ALL_EVENTS],
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


async def replicate(jetstream: JetStreamContext, *, replicas: int) -> None:
    """Spread existing streams over `replicas` servers, never over fewer than now. Only routers do this.

    A deployment that began with one server then goes on with three.
    """
    for name in stores.STREAMS:
        info = await repeated(partial(jetstream.stream_info, name))
        if (info.config.num_replicas or 1) < replicas:
            await repeated(partial(jetstream.update_stream, info.config.evolve(num_replicas=replicas)))


async def _made(make: Callable[[], Awaitable[object]]) -> bool:
    """Whether `make` succeeded, or would have made what exists; False if it exists with another configuration."""
    try:
        await repeated(make, COMING_UP_S)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True
