"""Small writes try whether the stores take what an edit writes; the outcome serves for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors
import structlog

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.bus.streams import is_full
from giornata.wire import subjects
from giornata.wire.errors import BlobStoreFull, GiornataError, StorageFull

BLOBS: Final = "blobs"
"""The blob store's name among the streams'."""
KNOWN_S: Final = 3.0
"""The outcome of a trial serves all requests for this long."""
SHOWN_S: Final = 30.0
"""A store is called full for this long without waiting for the next trial, which has begun."""
TRIAL_S: Final = 1.5
"""Limit of one write. A server that cannot store a message does not answer it at all."""
TRIAL_TTL_S: Final = 1
TRIAL_KEY: Final = "writable"
"""All gateways write one blob, again and again: an object store, which forgets nothing by itself, keeps one object."""
TRIAL: Final = bytes(4096)
"""As much as a file system's block: less may still fit into the last one of a file on a full disk."""

log = structlog.get_logger(__name__)


class StorageProbe:
    """Tries to write into the blob store, and into the streams that an edit needs, one at a time."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        *,
        told: Callable[[Mapping[str, bool]], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._bus, self._blobs, self._told, self._tasks = bus, blobs, told, tasks
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

    async def full_for_jobs(self, *, afresh: bool = False) -> GiornataError | None:
        """Return why JetStream takes no job; None where it does, or is away."""
        full = await self.full(afresh=afresh)
        return next((full[stream] for stream in _TRIALS if stream in full), None)

    async def _try(self) -> None:
        try:
            errors = await asyncio.gather(self._blob(), *map(self._message, _TRIALS))
        except Exception:  # the task's edge: what was known stays
            log.exception("stores_not_tried")
            return
        outcomes = dict(zip((BLOBS, *_TRIALS), errors, strict=True))
        self._full = {name: error for name, error in outcomes.items() if error is not None}
        self._tried_s = time.monotonic()
        self._told({name: error is not None for name, error in outcomes.items()})

    async def _blob(self) -> GiornataError | None:
        try:
            async with asyncio.timeout(TRIAL_S):
                await self._blobs.write(TRIAL_KEY, TRIAL, TRIAL_TTL_S)
        except (BlobStoreFull, StorageFull) as error:
            return error
        except (GiornataError, TimeoutError):  # it does not answer: `/healthz` says so
            pass
        return None

    async def _message(self, stream: str) -> GiornataError | None:
        """Why `stream` takes no message; None also where it has a limit that is reached, or JetStream is away."""
        client, reason = self._bus.client, "it does not answer writes, but other questions"
        try:
            if not client.is_connected or await self._is_stored(stream):
                return None
            # A server that stands still answers nothing; one that cannot write still answers reads.
            await client.jetstream(timeout=TRIAL_S).stream_info(_RECORDS)
            if await self._is_stored(stream) or not client.is_connected:
                return None
        except nats.errors.Error as error:
            if not is_full(error):
                return None
            reason = str(error)
        message = "JetStream does not store what is written. The disk of the NATS server is probably full."
        return StorageFull(message, received=f"{stream}: {reason}", retry_after_s=10)

    async def _is_stored(self, stream: str) -> bool:
        publish, (subject, headers) = self._bus.jetstream.publish, _TRIALS[stream]
        try:
            await publish(subject, TRIAL, timeout=TRIAL_S, headers=headers, msg_ttl=TRIAL_TTL_S)
        except nats.errors.TimeoutError:
            return False
        return True


_RECORDS: Final = subjects.bucket_stream(subjects.RECORDS)
_TRIALS: Final[Mapping[str, tuple[str, dict[str, str] | None]]] = {
    subjects.JOBS: (subjects.TRIAL_JOB, None),
    _RECORDS: (f"$KV.{subjects.RECORDS}.writable", {"KV-Operation": "DEL"}),
}
"""Subject and headers of a message that is stored for a moment, by the streams into which an accepted job is written.
Readers take a record's trial for a deletion."""
