"""Records of a key-value bucket in memory, for lists that would read each of them again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final, Generic, TypeVar

from nats.js.errors import NotFoundError
from pydantic import BaseModel

from giornata.records import RecordBucket
from giornata.retries import repeated
from giornata.wire import codec
from giornata.wire.stores import bucket_stream

R = TypeVar("R", bound=BaseModel)

FEW: Final = 64
"""So many changes are read one after the other, however few records the mirror holds."""
_OPERATION: Final = "KV-Operation"
"""The header of a revision that deletes its key."""


class BucketMirror(Generic[R]):
    """The records of a bucket by owner, the first token of their keys. Used from one event loop.

    It follows nothing for long: :meth:`refresh` asks for what has changed.
    """

    def __init__(self, bucket: RecordBucket[R]) -> None:
        self._bucket = bucket
        self._stream, self._keys = bucket_stream(bucket.name), f"$KV.{bucket.name}."
        self._owners: dict[str, dict[str, R]] = {}
        self._seen = 0
        """The last sequence of the bucket's stream that is here."""
        self._refreshing = asyncio.Lock()

    def of(self, owner: str) -> list[R]:
        """An owner's records as of the last :meth:`refresh`, in no order."""
        return list(self._owners.get(owner, {}).values())

    def all(self) -> list[R]:
        """Every owner's records, as :meth:`of`."""
        return [record for owned in self._owners.values() for record in owned.values()]

    @property
    def seen(self) -> int:
        """What :meth:`refresh` has read up to; the records are the same while it is."""
        return self._seen

    async def refresh(self) -> None:
        """Take every change that was acknowledged before the call."""
        async with self._refreshing:
            last = (await repeated(partial(self._bucket.jetstream.stream_info, self._stream))).state.last_seq
            behind = last - self._seen
            if behind < 0 or behind > FEW + sum(map(len, self._owners.values())):
                self._owners = await self._all()  # the bucket was made again, or this is quicker
            elif behind:
                await self._read_changes(last)
            self._seen = last

    async def _all(self) -> dict[str, dict[str, R]]:
        owners: dict[str, dict[str, R]] = {}
        _keep(owners, (await self._bucket.everything()).items())
        return owners

    async def _read_changes(self, last: int) -> None:
        sequence = self._seen
        while sequence < last:
            ask = partial(
                self._bucket.jetstream.get_msg, self._stream, sequence + 1, f"{self._keys}>", next=True
            )
            try:
                message = await repeated(ask)
            except NotFoundError:  # what followed has been removed
                return
            sequence, key = message.seq or last, (message.subject or "").removeprefix(self._keys)
            gone = message.data is None or _OPERATION in (message.headers or {})
            _keep(
                self._owners, [(key, None if gone else codec.decode(self._bucket.kind, message.data or b""))]
            )


def _keep(owners: dict[str, dict[str, R]], records: Iterable[tuple[str, R | None]]) -> None:
    """Put records in their places by key; None removes one."""
    for key, record in records:
        owned = owners.setdefault(key.partition(".")[0], {})
        if record is None:
            owned.pop(key, None)
        else:
            owned[key] = record
