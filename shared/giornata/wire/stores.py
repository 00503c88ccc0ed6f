"""Names of the streams and key-value buckets in JetStream. :mod:`giornata.bus.streams` makes them."""

from __future__ import annotations

import re
from typing import Final

from giornata.wire.jobs import Priority

JOBS: Final = "GIORNATA_JOBS"
"""Work queue of accepted jobs. A message lives until its job has ended."""
EVENTS: Final = "GIORNATA_EVENTS"
"""Events of all jobs, captured from core publishes, for replay."""
RECORDS: Final = "giornata-jobs"
TEMPLATES: Final = "giornata-templates"
LORAS: Final = "giornata-loras"
QUARANTINE: Final = "giornata-quarantine"
"""Key-value buckets of job records, registered templates, LoRAs, and jobs given up as their workers were lost."""
WANTED: Final = "giornata-wanted"
"""Key-value bucket of what each host tier of LoRAs should hold, by host; routers alone write it."""
WEBHOOKS: Final = "giornata-webhooks"
"""Key-value bucket of webhooks until their receivers have taken them; those that were given up stay for a week."""
LEASES: Final = "giornata-leases"
"""Key-value bucket of the lease that makes one router active; its revisions are the routers' epochs."""


def bucket_stream(bucket: str) -> str:
    """The stream that holds a key-value bucket."""
    return f"KV_{bucket}"


SHARED_STREAMS: Final = (EVENTS, *map(bucket_stream, (TEMPLATES, LORAS, WANTED, WEBHOOKS)))
"""Streams that gateways and LoRA stores may be the first to make."""
STREAMS: Final = (*SHARED_STREAMS, *map(bucket_stream, (RECORDS, QUARANTINE, LEASES)))
"""Streams that a deployment needs beside its work queue; denoisers and routers may be the first to make them."""


STORE_BYTES: Final = 7 << 30
"""Room that the streams on disk reserve together by default; deployed NATS servers have a file store of 8 GiB."""
LEAST_STORE_BYTES: Final = 16 << 20
LEASE_BYTES: Final = 1 << 20
EVENTS_BYTES: Final = 256 << 20
"""In memory. Beyond it the oldest events go. Previews have a share per job: see `PreviewEvent`."""
_SHARES: Final = {
    bucket_stream(RECORDS): 24,
    JOBS: 2,
    bucket_stream(TEMPLATES): 1,
    bucket_stream(LORAS): 1,
    bucket_stream(WANTED): 1,
    bucket_stream(WEBHOOKS): 1,
    bucket_stream(QUARANTINE): 1,
}
"""Parts of the store, of :data:`_PARTS`."""
_PARTS: Final = 32
"""One is free: earlier versions have left a bucket there, `giornata-prompts`, whose entries end with their time."""


def limits(store_bytes: int) -> dict[str, int]:
    """Most bytes of every stream, where those on disk may take `store_bytes` together.

    A server keeps this room free for each stream, so that a full one stops no other: above all not the lease.
    """
    part = (store_bytes - LEASE_BYTES) // _PARTS
    shares = {stream: part * share for stream, share in _SHARES.items()}
    return {**shares, bucket_stream(LEASES): LEASE_BYTES, EVENTS: EVENTS_BYTES}


def wanted_key(tier: str) -> str:
    """The key of what the router wants of a host tier."""
    return f"{tier}.main"


def queue_consumer_name(priority: Priority, epoch: tuple[int, int]) -> str:
    """Name of the consumer with which the leader of an epoch takes the jobs of one priority."""
    created_us, revision = epoch
    return f"router-{priority}-{created_us}-{revision}"


def queue_consumer_epoch(name: str, priority: Priority) -> tuple[int, int] | None:
    """The epoch in a consumer's name; (0, 0) where it was made before epochs were, None for another priority's."""
    first, _, told = name.partition(f"router-{priority}")
    if first:
        return None
    if not told:
        return 0, 0
    found = _EPOCH.fullmatch(told)
    return (int(found[1]), int(found[2])) if found else None


_EPOCH: Final = re.compile(r"-(\d+)-(\d+)")
