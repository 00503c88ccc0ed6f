"""Names of the streams and key-value buckets in JetStream. :mod:`giornata.bus.streams` makes them."""

from __future__ import annotations

from typing import Final

from giornata.wire.jobs import Priority

JOBS: Final = "GIORNATA_JOBS"
"""Work queue of accepted jobs. A message lives until its job has ended."""
EVENTS: Final = "GIORNATA_EVENTS"
"""Events of all jobs, captured from core publishes, for replay."""
RECORDS: Final = "giornata-jobs"
TEMPLATES: Final = "giornata-templates"
QUARANTINE: Final = "giornata-quarantine"
"""Key-value buckets of job records, registered templates, and jobs that were given up as their workers were lost."""
LEASES: Final = "giornata-leases"
"""Key-value bucket whose entries expire unless renewed."""


def bucket_stream(bucket: str) -> str:
    """The stream that holds a key-value bucket."""
    return f"KV_{bucket}"


STREAMS: Final = (EVENTS, *map(bucket_stream, (RECORDS, TEMPLATES, QUARANTINE, LEASES)))
"""Streams that :func:`giornata.bus.streams.ensure` makes; any service that keeps something may be the first."""


def queue_consumer_name(priority: Priority, epoch: int) -> str:
    """Name of the consumer with which the leader of an epoch takes the jobs of one priority."""
    return f"router-{priority}-{epoch}"


def queue_consumer_epoch(name: str, priority: Priority) -> int | None:
    """The epoch in a consumer's name; 0 where it was made before epochs were, None for another priority's consumer."""
    first, _, epoch = name.partition(f"router-{priority}")
    if first or (epoch and not epoch.removeprefix("-").isdecimal()):
        return None
    return int(epoch.removeprefix("-") or 0)
