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
"""Key-value bucket of the lease that makes one router active; its revisions are the routers' epochs."""


def bucket_stream(bucket: str) -> str:
    """The stream that holds a key-value bucket."""
    return f"KV_{bucket}"


STREAMS: Final = (EVENTS, *map(bucket_stream, (RECORDS, TEMPLATES, QUARANTINE, LEASES)))
"""Streams that :func:`giornata.bus.streams.ensure` makes; any service that keeps something may be the first."""


def queue_consumer_name(priority: Priority) -> str:
    """Name of the durable consumer of one priority of the work queue."""
    return f"router-{priority}"
