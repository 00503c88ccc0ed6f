"""The room in JetStream's streams, as the active router reads it; when records run out of it, no job is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

import nats.errors
import structlog
from nats.js import JetStreamContext

from giornata.retries import ask_jetstream
from giornata.wire import stores
from giornata.wire.errors import StoreFull
from giornata.wire.workers import StoreRoom

READ_S: Final = 1.0
RETRY_AFTER_S: Final = 30.0
DOOR: Final = 0.9
"""Share of the bucket beyond which no job is accepted."""
GROWTH_BYTES: Final = 16 << 10
"""Room kept for every unfinished job, whose record grows until it ends: with ten pictures of 4096 tokens to 10 kB."""

_STREAMS: Final = (stores.JOBS, *stores.STREAMS)

log = structlog.get_logger(__name__)


class StreamCapacity:
    """The fill level of each stream. Nothing is known, and every job may come, until :meth:`watch` has read it."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self._jetstream = jetstream
        self._stores: Mapping[str, StoreRoom] = {}
        self._unfinished = 0
        """Jobs in the work queue at the last reading, and accepted since."""

    @property
    def stores(self) -> tuple[StoreRoom, ...] | None:
        """Every stream; None while nothing is known."""
        return tuple(self._stores.values()) or None

    def take(self) -> None:
        """Count one more job, or raise StoreFull if its record may not fit."""
        records = self._stores.get(stores.bucket_stream(stores.RECORDS))
        if records is not None and not may_come(records, self._unfinished):
            raise StoreFull(
                received=f"{records.used_bytes} of {records.limit_bytes} bytes taken by records, "
                f"{self._unfinished} unfinished jobs",
                retry_after_s=RETRY_AFTER_S,
            )
        self._unfinished += 1

    async def watch(self) -> None:
        """Read the room for ever; a reading that fails leaves what is known."""
        while True:
            try:
                await self._read()
            except nats.errors.Error as error:
                log.warning("room_not_read", error=repr(error))
            await asyncio.sleep(READ_S)  # no event tells of it

    async def _read(self) -> None:
        asks = (ask_jetstream(partial(self._jetstream.stream_info, name)) for name in _STREAMS)
        found = dict(zip(_STREAMS, await asyncio.gather(*asks), strict=True))
        self._stores = {
            name: StoreRoom(store=name, used_bytes=info.state.bytes, limit_bytes=info.config.max_bytes)
            for name, info in found.items()
            if info.config.max_bytes is not None and info.config.max_bytes > 0
        }
        self._unfinished = found[stores.JOBS].state.messages


def may_come(records: StoreRoom, unfinished: int) -> bool:
    """Return whether one more job fits, so that all of the `unfinished` ones before it can still write their ends.

    A full stream takes no revision that is as large as the one that it replaces, and with replicas none at all.
    """
    return records.used_bytes + (unfinished + 1) * GROWTH_BYTES <= DOOR * records.limit_bytes
