"""The JetStream streams and key-value buckets; every service makes sure of them when it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
from nats.js.errors import APIError, BadRequestError

from giornata.retries import COMING_UP_S, repeated
from giornata.wire import stores, subjects
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.events import KEPT

LEASE_TTL_S: Final = 3.0
"""The life of a router's lease, by the routers' own clocks; no server's clock ends it."""
BUCKET_TTL_S: Final = {
    stores.RECORDS: 24 * 3600,  # at the least, see records_ttl_s
    stores.TEMPLATES: 31 * 24 * 3600,  # of an unused one; gateways may be configured for a shorter life
    stores.QUARANTINE: 7 * 24 * 3600,
    stores.LEASES: 0,  # never; buckets from before have a time to live, which routers do not rely on
}
_STREAM_NAME_IN_USE: Final = 10058
"""JetStream's error code."""
_NO_ROOM: Final = {10005, 10028, 10047}
"""JetStream's error codes: no server, memory or file store has as much room as a stream would reserve."""
LINGER_S: Final = 600
"""How long the record of an ended job outlives its results by default."""
KEPT_EVENTS: Final = tuple(map(subjects.events_of_kind, KEPT))
"""What the event stream captures."""


def records_ttl_s(result_ttl_s: float, linger_s: float) -> float:
    """Life of a record that is not written again; JetStream lets no single record live longer."""
    return max(BUCKET_TTL_S[stores.RECORDS], result_ttl_s + linger_s)


async def ensure_queue(
    jetstream: JetStreamContext, *, replicas: int, max_messages: int, store_bytes: int = stores.STORE_BYTES
) -> None:
    """Create the work queue, or bring its limits up to date. Only routers do this."""
    config = StreamConfig(
        name=stores.JOBS,
        subjects=[subjects.ALL_JOBS],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=max_messages,
        max_bytes=stores.limits(store_bytes)[stores.JOBS],
        num_replicas=replicas,
    )
    if not await _made(partial(jetstream.add_stream, config), stores.JOBS, store_bytes):
        await _updated(jetstream, config, store_bytes)


async def ensure(
    jetstream: JetStreamContext, *, replicas: int, events_ttl_s: float, store_bytes: int = stores.STORE_BYTES
) -> None:
    """Create the event stream, which keeps events for `events_ttl_s`, and the buckets that do not exist yet.

    ServiceUnavailable if the server has less room than they reserve: together `store_bytes` of its file store, with
    the work queue.
    """
    limits = stores.limits(store_bytes)
    events = StreamConfig(
        name=stores.EVENTS,
        subjects=list(KEPT_EVENTS),
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_age=events_ttl_s,
        max_bytes=limits[stores.EVENTS],
        num_replicas=replicas,
    )
    await _made(partial(jetstream.add_stream, events), stores.EVENTS, store_bytes)
    ttls_s = BUCKET_TTL_S | {stores.RECORDS: records_ttl_s(events_ttl_s, LINGER_S)}
    for bucket, ttl_s in ttls_s.items():
        stream = stores.bucket_stream(bucket)
        config = KeyValueConfig(
            bucket=bucket, ttl=ttl_s, history=1, max_bytes=limits[stream], replicas=replicas
        )
        await _made(partial(jetstream.create_key_value, config), stream, store_bytes)


async def renew(
    jetstream: JetStreamContext, *, replicas: int, store_bytes: int, records_ttl_s: float
) -> None:
    """Bring existing streams up to date: servers, limits, and the life of job records. Only routers do this.

    Streams are spread over `replicas` servers, never over fewer than now: a deployment that began with one server then
    goes on with three. Earlier versions made streams without a limit, and an event stream that captured steps, too. A
    stream that holds more than its limit keeps it, and takes nothing new until enough has expired.
    """
    limits = stores.limits(store_bytes)
    found = [(await repeated(partial(jetstream.stream_info, name))).config for name in stores.STREAMS]
    for config in sorted(found, key=lambda config: limits[str(config.name)] - (config.max_bytes or 0)):
        name = str(config.name)
        wanted = config.evolve(num_replicas=max(replicas, config.num_replicas or 1), max_bytes=limits[name])
        if name == stores.EVENTS:
            wanted = wanted.evolve(subjects=list(KEPT_EVENTS))
        if name == stores.bucket_stream(stores.RECORDS):  # its terminal records have a life of their own
            wanted = wanted.evolve(max_age=records_ttl_s, allow_msg_ttl=True)
        if wanted != config:
            await _updated(jetstream, wanted, store_bytes)


async def _made(make: Callable[[], Awaitable[object]], stream: str, store_bytes: int) -> bool:
    """Whether `make` succeeded, or would have made what exists; False if it exists with another configuration."""
    try:
        with _told_of_no_room(stream, store_bytes):
            await repeated(make, COMING_UP_S)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True


async def _updated(jetstream: JetStreamContext, config: StreamConfig, store_bytes: int) -> None:
    with _told_of_no_room(str(config.name), store_bytes):
        await repeated(partial(jetstream.update_stream, config))


@contextmanager
def _told_of_no_room(stream: str, store_bytes: int) -> Iterator[None]:
    """Raise ServiceUnavailable, with what to do, where JetStream refuses the room that a stream would reserve."""
    try:
        yield
    except APIError as error:
        if error.err_code not in _NO_ROOM:
            raise
        raise ServiceUnavailable(
            f"The NATS server has no room for the stream {stream} ({error.description}). Raise its max_file_store, or "
            "lower GIORNATA_NATS_STORE_BYTES, for all services alike; events take "
            f"{stores.EVENTS_BYTES >> 20} MiB of its max_memory_store.",
            received=f"a limit of {stores.limits(store_bytes)[stream]} bytes",
            accepted=f"{store_bytes} bytes of file store for all streams",
        ) from error
