"""Records of one kind in a bucket of JetStream's key-value store: read, create, change by revision, list, follow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Generic, TypeVar

from nats.js.errors import InvalidKeyError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import BaseModel

from giornata.bus.patience import repeated, written
from giornata.deadlines import Deadline
from giornata.wire import codec
from giornata.wire.errors import GiornataError, InternalError

R = TypeVar("R", bound=BaseModel)

MAX_CONFLICTS: Final = 50
"""Losing this many races in a row means that something is wrong, not that the record is busy."""


class RecordBucket(Generic[R]):
    """Records of kind `R` by key.

    Reads and writes wait for a cluster of NATS servers that chooses a leader. A write that is not answered may have
    been taken.

    Args:
        bucket: the key-value store.
        kind: what each entry is.
        key_of: the key of a record.
        missing: raised where a key has no record; it names the last token of the key.
    """

    def __init__(
        self, bucket: KeyValue, kind: type[R], key_of: Callable[[R], str], missing: type[GiornataError]
    ) -> None:
        self._bucket = bucket
        self._kind = kind
        self._key_of = key_of
        self._missing = missing

    async def read(self, key: str) -> tuple[R, int]:
        """A record and its revision; `missing` where there is none."""
        try:
            entry = await repeated(lambda: self._bucket.get(key))
        except (KeyNotFoundError, InvalidKeyError) as error:
            raise self._none(key) from error
        if entry.value is None or entry.revision is None:
            raise self._none(key)
        return codec.decode(self._kind, entry.value), entry.revision

    async def get(self, key: str) -> R:
        """A record; `missing` where there is none."""
        return (await self.read(key))[0]

    async def create(self, record: R) -> bool:
        """Write the first revision; False if there is one already."""
        try:
            await written(lambda: self._bucket.create(self._key_of(record), codec.encode(record)))
        except KeyWrongLastSequenceError:
            return False
        return True

    async def put(self, record: R) -> None:
        """Write a record, whether there is one or not."""
        await written(lambda: self._bucket.put(self._key_of(record), codec.encode(record)))

    async def change(self, key: str, change: Callable[[R], R | None]) -> R:
        """Apply `change` to the present record and write the result; start over if another writer was faster.

        Args:
            key: of the record.
            change: a pure function from the present record to the next, or None to leave it as it is.

        Returns:
            The record as it stands afterwards; `missing` is raised where there is none.
        """
        for _ in range(MAX_CONFLICTS):
            record, revision = await self.read(key)
            following = change(record)
            if following is None or following == record:
                return record
            try:
                data = codec.encode(following)
                await written(partial(self._bucket.update, key, data, last=revision))
            except KeyWrongLastSequenceError:
                continue
            return following
        raise InternalError(f"The record {key} is changed by too many at once.")

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Forget a record, if it still has `revision`; a record that is not there is no error."""
        await written(lambda: self._bucket.delete(key, last=revision))

    async def matching(self, pattern: str) -> list[R]:
        """Every record whose key matches, in no order."""
        found: list[R] = []
        async with self.watching(pattern) as watcher:
            async for entry in watcher:
                if entry is None:  # the end of what there was
                    break
                if entry.operation is None and entry.value is not None:
                    found.append(codec.decode(self._kind, entry.value))
        return found

    @asynccontextmanager
    async def watching(self, pattern: str) -> AsyncIterator[KeyValue.KeyWatcher]:
        """Entries of matching keys: the present ones, None, then every change."""
        watcher = await repeated(lambda: self._bucket.watch(pattern))
        try:
            yield watcher
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]  # nats-py annotates it in part

    async def until(self, key: str, condition: Callable[[R], bool], deadline: Deadline) -> R:
        """The record as soon as `condition` holds for it, or as it stands at `deadline`; `missing` once it is gone."""
        record, _ = await self.read(key)
        if condition(record) or not deadline.remaining_s():
            return record
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s()), self.watching(key) as watcher:
                async for entry in watcher:
                    if entry is None:
                        continue
                    if entry.operation is not None or entry.value is None:
                        raise self._none(key)
                    record = codec.decode(self._kind, entry.value)
                    if condition(record):
                        break
        return record

    def _none(self, key: str) -> GiornataError:
        return self._missing(received=key.rpartition(".")[2])
