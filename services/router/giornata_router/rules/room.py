"""Whether the bucket of job records has room for another job. Pure."""

from __future__ import annotations

from typing import Final

from giornata.wire.queues import StoreRoom

DOOR: Final = 0.9
"""Share of the bucket beyond which no job is accepted."""
GROWTH_BYTES: Final = 16 << 10
"""Room kept for every unfinished job, whose record grows until it ends: with ten pictures of 4096 tokens to 10 kB."""


def may_come(records: StoreRoom, unfinished: int) -> bool:
    """Whether one more job fits, so that all of the `unfinished` ones before it can still write their ends.

    A full stream takes no revision that is as large as the one that it replaces, and with replicas none at all.
    """
    return records.used_bytes + (unfinished + 1) * GROWTH_BYTES <= DOOR * records.limit_bytes
