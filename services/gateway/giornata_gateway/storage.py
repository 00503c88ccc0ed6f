"""Whether the stores take what an edit writes: tried by small writes, and known for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import nats.errors
from nats.js.errors import APIError

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.bus.streams import is_full
from giornata.wire import stores, subjects
from giornata.wire.cells import in_cell
from giornata.wire.errors import BlobStoreFull, GiornataError, StorageFull

BLOBS: Final = "blobs"
"""The blob store's name among the streams'."""
KNOWN_S: Final = 3.0
"""How long the outcome of a trial serves all requests."""
SHOWN_S: Final = 30.0
"""How long a full store is told of without waiting for the next trial, which has begun."""
TRIAL_S: Final = 1.5
"""Limit of one write. A server that cannot store a message does not answer it at all."""
TRIAL_TTL_S: Final = 1
TRIAL: Final = bytes(4096)
"""As much as a file system's block: less may still fit into the last one of a file on a full disk."""
_DELETED: Final = {"KV-Operation": "DEL"}
"""Headers of a message that readers of a bucket take for no record."""


class Storage:
    """Tries to write into the blob store, and into the streams of each of `cells` that an edit needs, one at a time."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        *,
        instance: str,
        cells: Callable[[], Iterable[str]],
        told: Callable[[Mapping[str, bool]], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._bus, self._blobs, self._cells, self._told, self._tasks = bus, blobs, cells, told, tasks
        self._key = f"writable/{instance}"
        self._full: dict[str, GiornataError] = {}
        self._tried_s: float | None = None
        self._trying: asyncio.Task[None] | None = None

    async def full(self, *, afresh: bool = False) -> Mapping[str, GiornataError]:
        """The stores that take nothing now, and why; a store that does not answer at all is not among them."""
        age_s = None if self._tried_s is None else time.monotonic() - self._tried_s
        if age_s is None or age_s > KNOWN_S or afresh:
            if self._trying is None or self._trying.done():
                self._trying = self._tasks.create_task(self._try(), name="storage")
            if afresh or not self._full or age_s is None or age_s > SHOWN_S:
                await asyncio.shield(self._trying)
        return self._full

    async def full_for(self, cell: str, *, afresh: bool = False) -> GiornataError | None:
        """Why JetStream takes no job of `cell`; None where it does, or is away."""
        full = await self.full(afresh=afresh)
        return next((full[stream] for stream in _streams(cell) if stream in full), None)

    async def _try(self) -> None:
        cells = tuple(self._cells())
        names = [BLOBS, *(stream for cell in cells for stream in _streams(cell))]
        trials = [self._blob(), *(self._message(stream, cell) for cell in cells for stream in _streams(cell))]
        outcomes = zip(names, await asyncio.gather(*trials), strict=True)
        self._full = {name: error for name, error in outcomes if error is not None}
        self._tried_s = time.monotonic()
        self._told({name: name in self._full for name in names})

    async def _blob(self) -> GiornataError | None:
        try:
            async with asyncio.timeout(TRIAL_S):
                await self._blobs.write(self._key, TRIAL, TRIAL_TTL_S)
        except (BlobStoreFull, StorageFull) as error:
            return error
        except (GiornataError, TimeoutError):  # it does not answer: `/healthz` says so
            pass
        return None

    async def _message(self, stream: str, cell: str) -> GiornataError | None:
        """Why `stream` takes no message; None also where it has a limit that is reached, or JetStream is away."""
        if not self._bus.client.is_connected:
            return None
        try:
            try:
                await self._publish(stream, cell)
            except nats.errors.TimeoutError:
                # A server that stands still answers nothing; one that cannot write answers what it need not write.
                records = stores.bucket_stream(stores.own_name(stores.RECORDS, cell))
                await self._bus.client.jetstream(timeout=TRIAL_S).stream_info(records)
            else:
                return None
            await self._publish(stream, cell)
        except nats.errors.TimeoutError:
            if self._bus.client.is_connected:
                return StorageFull(
                    "JetStream does not store what is written. The disk of the NATS server is probably full.",
                    received=stream,
                    retry_after_s=10,
                )
        except nats.errors.Error as error:
            if is_full(error):
                return StorageFull(received=f"{stream}: {_description(error)}", retry_after_s=10)
        return None

    async def _publish(self, stream: str, cell: str) -> None:
        jobs = stream == stores.own_name(stores.JOBS, cell)
        subject = (
            in_cell(subjects.TRIAL_JOB, cell)
            if jobs
            else f"$KV.{stores.own_name(stores.RECORDS, cell)}.writable"
        )
        headers = None if jobs else _DELETED
        publish = self._bus.jetstream.publish
        await publish(subject, TRIAL, timeout=TRIAL_S, headers=headers, msg_ttl=TRIAL_TTL_S)


def _streams(cell: str) -> tuple[str, str]:
    """The streams of `cell` into which an accepted job is written."""
    return stores.own_name(stores.JOBS, cell), stores.bucket_stream(stores.own_name(stores.RECORDS, cell))


def _description(error: Exception) -> str:
    return (error.description if isinstance(error, APIError) else None) or type(error).__name__
