"""The JetStream streams and key-value buckets; every service makes sure of them when it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
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

from giornata.bus.connection import COMING_UP_S, ask_jetstream, error_code
from giornata.wire import subjects
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.messages import KEPT

LEASE_TTL_S: Final = 3.0
"""The life of a router's lease, by the routers' own clocks; no server's clock ends it."""
TEMPLATES_TTL_S: Final = 31 * 24 * 3600
"""The life of a template that is not used; gateways may be configured for a shorter life."""
LORAS_TTL_S: Final = 0
"""Never: a LoRA is kept until it is deleted."""
SHARED_TTL_S: Final = {
    subjects.TEMPLATES: TEMPLATES_TTL_S,
    subjects.LORAS: LORAS_TTL_S,
    subjects.WANTED: 0,  # a plan holds until the next one
    subjects.WEBHOOKS: 7 * 24 * 3600,  # longer than any is tried
}
BUCKET_TTL_S: Final = {
    subjects.RECORDS: 24 * 3600,  # at the least, see records_ttl_s
    subjects.QUARANTINE: 7 * 24 * 3600,
    subjects.LEASES: 0,  # never; buckets from before have a time to live, which routers do not rely on
}
_STREAM_NAME_IN_USE: Final = 10058
"""JetStream's error code."""
_NO_ROOM: Final = {10005, 10028, 10047}
"""JetStream's error codes: no server, memory or file store has as much room as a stream would reserve."""
_INSUFFICIENT: Final = {10023, 10047}
"""JetStream's error codes: the file store of the server or of all servers is used up."""
LINGER_S: Final = 600
"""How long the record of an ended job outlives its results by default."""
KEPT_EVENTS: Final = tuple(map(subjects.events_of_kind, KEPT))
"""What the event stream captures."""


def is_full(error: BaseException) -> bool:
    """Return whether JetStream refuses a message for want of room on its disk, or in its file store as a whole."""
    text = str(getattr(error, "description", None) or "").lower()
    return error_code(error) in _INSUFFICIENT or "no space left" in text


def records_ttl_s(result_ttl_s: float, linger_s: float) -> float:
    """Life of a record that is not written again; JetStream lets no single record live longer."""
    return max(BUCKET_TTL_S[subjects.RECORDS], result_ttl_s + linger_s)


async def ensure_queue(
    jetstream: JetStreamContext,
    *,
    replicas: int,
    max_messages: int,
    store_bytes: int = subjects.STORE_BYTES,
) -> None:
    """Create the work queue, or bring its limits up to date. Only routers do this."""
    config = StreamConfig(
        name=subjects.JOBS,
        subjects=[subjects.ALL_JOBS],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs=max_messages,
        max_bytes=subjects.limits(store_bytes)[subjects.JOBS],
        num_replicas=replicas,
        allow_msg_ttl=True,  # trials end by themselves
    )
    with _told_of_no_room(config, store_bytes):
        if not await _made(partial(jetstream.add_stream, config)):
            await ask_jetstream(partial(jetstream.update_stream, config))


async def ensure(
    jetstream: JetStreamContext,
    *,
    replicas: int,
    events_ttl_s: float,
    store_bytes: int = subjects.STORE_BYTES,
) -> None:
    """Create what does not exist yet: the buckets and the event stream.

    ServiceUnavailable if the server has less room than they reserve: together `store_bytes` of its file store, with
    the work queue.
    """
    await ensure_shared(jetstream, replicas=replicas, events_ttl_s=events_ttl_s, store_bytes=store_bytes)
    ttls_s = BUCKET_TTL_S | {subjects.RECORDS: records_ttl_s(events_ttl_s, LINGER_S)}
    await _ensure_buckets(jetstream, ttls_s, replicas, store_bytes)


async def ensure_shared(
    jetstream: JetStreamContext,
    *,
    replicas: int,
    events_ttl_s: float,
    store_bytes: int = subjects.STORE_BYTES,
) -> None:
    """Create what gateways and LoRA stores need, as :func:`ensure`: the event stream, buckets of tenants and plans."""
    events = StreamConfig(
        name=subjects.EVENTS,
        subjects=list(KEPT_EVENTS),
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_age=events_ttl_s,
        max_bytes=subjects.limits(store_bytes)[subjects.EVENTS],
        num_replicas=replicas,
    )
    with _told_of_no_room(events, store_bytes):
        await _made(partial(jetstream.add_stream, events))
    await _ensure_buckets(jetstream, SHARED_TTL_S, replicas, store_bytes)


async def _ensure_buckets(
    jetstream: JetStreamContext, ttls_s: Mapping[str, float], replicas: int, store_bytes: int
) -> None:
    limits = subjects.limits(store_bytes)
    for bucket, ttl_s in ttls_s.items():
        size = limits[subjects.bucket_stream(bucket)]
        config = KeyValueConfig(bucket, ttl=ttl_s, history=1, max_bytes=size, replicas=replicas)
        with _told_of_no_room(StreamConfig(name=subjects.bucket_stream(bucket), max_bytes=size), store_bytes):
            await _made(partial(jetstream.create_key_value, config))


async def update(
    jetstream: JetStreamContext,
    *,
    replicas: int,
    store_bytes: int,
    records_ttl_s: float,
) -> None:
    """Bring existing streams up to date, but for the work queue: limits, the life of records. Only routers do this.

    They are spread over `replicas` servers, never over fewer than now: a deployment that began with one server then
    goes on with three. Earlier versions made streams without a limit, and an event stream that captured more. A stream
    that holds more than its limit keeps it, and takes nothing new until enough has expired.
    """
    most = subjects.limits(store_bytes)
    found = [(await ask_jetstream(partial(jetstream.stream_info, name))).config for name in subjects.STREAMS]
    # what shrinks makes room for what grows
    for config in sorted(found, key=lambda config: most[str(config.name)] - (config.max_bytes or 0)):
        name = str(config.name)
        wanted = config.evolve(max_bytes=most[name], num_replicas=max(replicas, config.num_replicas or 1))
        if name == subjects.EVENTS:
            wanted = wanted.evolve(subjects=list(KEPT_EVENTS))
        if name == subjects.bucket_stream(subjects.RECORDS):
            wanted = wanted.evolve(
                max_age=records_ttl_s, allow_msg_ttl=True
            )  # ended jobs' have a life of their own
        if wanted != config:
            with _told_of_no_room(wanted, store_bytes):
                await ask_jetstream(partial(jetstream.update_stream, wanted))


async def _made(make: Callable[[], Awaitable[object]]) -> bool:
    """Whether `make` succeeded, or would have made what exists; False if it exists with another configuration."""
    try:
        await ask_jetstream(make, COMING_UP_S)
    except BadRequestError as error:
        if error.err_code != _STREAM_NAME_IN_USE:
            raise
        return False
    return True


@contextmanager
def _told_of_no_room(config: StreamConfig, store_bytes: int) -> Iterator[None]:
    """Raise ServiceUnavailable, with what to do, where JetStream refuses the room that a stream would reserve."""
    try:
        yield
    except APIError as error:
        if error.err_code not in _NO_ROOM:
            raise
        raise ServiceUnavailable(
            f"The NATS server has no room for the stream {config.name} ({error.description}). Raise its "
            "max_file_store, or lower GIORNATA_NATS_STORE_BYTES, for all services alike; events take "
            f"{subjects.EVENTS_BYTES >> 20} MiB of its max_memory_store.",
            received=f"a limit of {config.max_bytes} bytes",
            accepted=f"{store_bytes} bytes of file store for all streams",
        ) from error
