"""A blob store with the memory of one host in front of it, for hand-overs between its services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import structlog

from giornata.blobs.folder import Folder
from giornata.blobs.store import INLINE_BYTES, BlobStore, blake3_of, either, matches
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import BlobRef

SWEEP_S: Final = 15.0
"""How often each process removes the copies that have ended, also those of a process that was killed."""
BEHIND_BYTES: Final = 64 << 20
"""A hand-over waits for the store if this much of one process is still on its way there."""

log = structlog.get_logger(__name__)


class HostBlobs(BlobStore):
    """`store`, with copies of what is handed over in a folder. Make it with :meth:`open`.

    A hand-over returns when the copy is made; the store's write follows. Readers of this host take the copy. All others
    read from the store, which alone decides how long a blob lives. If the store does not take a blob, the next
    hand-over waits for its own write and raises its error.
    """

    def __init__(self, store: BlobStore, folder: Folder) -> None:
        self._store, self._folder = store, folder
        self._behind: dict[str, asyncio.Task[GiornataError | None]] = {}
        """The store's writes under way, by key."""
        self._tasks: set[asyncio.Task[GiornataError | None]] = set()
        """These, and those that make the next copy's memory ready."""
        self._behind_bytes = 0
        self._refused = False
        """Whether the store did not take the last one that ended."""

    @classmethod
    @asynccontextmanager
    async def open(cls, store: BlobStore, folder: Folder) -> AsyncIterator[HostBlobs]:
        """Both stay the caller's. Leaving waits until the store has answered every write."""
        blobs = cls(store, folder)
        sweeping = asyncio.create_task(blobs._sweep(), name="sweep hand-overs")
        try:
            yield blobs
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
            if blobs._tasks:
                await asyncio.wait(blobs._tasks)

    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        await self._forget(key)
        await self._store.write(key, data, ttl_s)

    async def hand_over(self, key: str, data: bytes, ttl_s: int) -> BlobRef:
        await self._forget(key)
        copy = partial(self._copied, key, data, ttl_s)
        ref = await either(len(data) <= INLINE_BYTES, copy)
        if ref is None:
            return await self._store.put(key, data, ttl_s)
        waits = self._refused or self._behind_bytes + len(data) > BEHIND_BYTES
        task = self._behind[key] = asyncio.create_task(self._follow(key, data, ttl_s), name=f"store {key}")
        self._behind_bytes += len(data)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if waits and (error := await task):
            self._folder.remove(key)
            raise error
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        if ref.blake3 is not None:
            read = partial(self._folder.read, ref)
            data = await either(ref.size_bytes <= INLINE_BYTES, read)
            if data is not None and await matches(ref, data):
                return data
            await self._settled(ref.key)
        return await self._store.get(ref)

    async def has(self, ref: BlobRef) -> bool:
        await self._settled(ref.key)
        return await self._store.has(ref)

    async def renew(self, ref: BlobRef, ttl_s: int) -> bool:
        await self._forget(ref.key)
        return await self._store.renew(ref, ttl_s)

    async def delete(self, *refs: BlobRef) -> None:
        for ref in refs:
            await self._forget(ref.key)
        await self._store.delete(*refs)

    async def ping(self) -> None:
        await self._store.ping()

    def _copied(self, key: str, data: bytes, ttl_s: int) -> BlobRef | None:
        """The claim check of a copy that is made now; None if there is no room for it."""
        if not self._folder.write(key, data, ttl_s):
            return None
        return BlobRef(key=key, size_bytes=len(data), sha256="", blake3=blake3_of(data))

    async def _follow(self, key: str, data: bytes, ttl_s: int) -> GiornataError | None:
        """Bring the store what was handed over; why it did not take it."""
        try:
            await self._store.write(key, data, ttl_s)
        except GiornataError as error:
            self._refused = True
            log.warning("hand_over_not_stored", key=key, error=str(error))
            return error
        else:
            self._refused = False
            return None
        finally:
            self._behind_bytes -= len(data)
            del self._behind[key]
            if len(data) <= INLINE_BYTES:  # others are copied in a thread, where time matters less
                await asyncio.to_thread(self._folder.prepare, len(data))

    async def _forget(self, key: str) -> None:
        """Remove the copy, and let a write under way end before another command for its key."""
        self._folder.remove(key)
        await self._settled(key)

    async def _settled(self, key: str) -> None:
        if key in self._behind:
            await asyncio.wait((self._behind[key],))

    async def _sweep(self) -> None:
        while True:
            self._folder.sweep()
            await asyncio.sleep(SWEEP_S)
