"""Records in JetStream's key-value buckets: jobs, and jobs that were given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import APIError, InvalidKeyError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import BaseModel

from giornata.bus.streams import LINGER_S, is_full
from giornata.cancellation import heed_cancel
from giornata.deadlines import Deadline
from giornata.retries import error_code, repeated, written
from giornata.wire import codec
from giornata.wire.errors import GiornataError, InternalError, JobNotFound, StoreFull
from giornata.wire.progress import JobRecord
from giornata.wire.stores import QUARANTINE, RECORDS

R = TypeVar("R", bound=BaseModel)

Change = Callable[[R], R | None]
"""A pure function from the present record to the next, or None to leave it as it is."""
UNHEARD_S: Final = 30.0
"""A watcher's consumer ends this long after its client has left; until then it counts against the server's limit."""
ASKED_AT_ONCE: Final = 64
"""Records of a list that are read side by side."""
MANY: Final = 256
"""More records than these come sooner from a consumer of the stream, though the server has to make one."""
FOLLOWED_S: Final = 30.0
"""How long that may take; then they are read one by one."""
MAX_CONFLICTS: Final = 50
"""Losing this many races in a row means that something is wrong, not that the record is busy."""
_STORE_FAILED: Final = 10077
_WRONG_LAST: Final = {10071, 10164}
"""JetStream's error codes: a stream's limit is reached; another writer was faster."""
FULL_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class RecordRevision(Generic[R]):
    """A record as it was at one of its revisions, which may be the present one."""

    record: R
    revision: int


@dataclass(frozen=True)
class RecordBucket(Generic[R]):
    """Records of kind `R` by key, in a bucket that :func:`giornata.bus.streams.ensure` made.

    Reads and writes wait for a cluster of NATS servers that chooses a leader. A write that is not answered may have
    been taken. Where a key has no record, `missing` is raised with the last token of the key.
    """

    jetstream: JetStreamContext
    name: str
    bucket: KeyValue
    kind: type[R]
    key_of: Callable[[R], str]
    missing: type[GiornataError]

    async def read(self, key: str) -> RecordRevision[R]:
        """The present revision of a record."""
        try:
            entry = await repeated(lambda: self.bucket.get(key))
        except (KeyNotFoundError, InvalidKeyError) as error:
            raise self._none(key) from error
        if entry.value is None or entry.revision is None:
            raise self._none(key)
        return RecordRevision(codec.decode(self.kind, entry.value), entry.revision)

    async def get(self, key: str) -> R:
        """A record."""
        return (await self.read(key)).record

    async def create(self, record: R) -> int | None:
        """Write the first revision, and return its number; None if there is one already.

        StoreFull if the bucket has no room.
        """
        try:
            return await written(lambda: self.bucket.create(self.key_of(record), codec.encode(record)))
        except KeyWrongLastSequenceError:
            return None
        except APIError as error:
            if error_code(error) != _STORE_FAILED or is_full(error):
                raise
            raise StoreFull(received=self.key_of(record), retry_after_s=FULL_RETRY_S) from error

    async def put(self, record: R) -> int:
        """Write a record, whether there is one or not, and return the number of its revision."""
        return await written(lambda: self.bucket.put(self.key_of(record), codec.encode(record)))

    async def change(self, key: str, change: Change[R]) -> R:
        """The record after `change` was applied to the present one, again if another writer was faster."""
        return (await self.revise(key, change)).record

    async def revise(
        self, key: str, change: Change[R], known: RecordRevision[R] | None = None
    ) -> RecordRevision[R]:
        """As :meth:`change`. `known` is the revision that is probably the present one: so long, nothing is read.

        What is to stay as it is was read, and is not only known.
        """
        for _ in range(MAX_CONFLICTS):
            present = known or await self.read(key)
            following = change(present.record)
            if following is not None and following != present.record:
                with contextlib.suppress(KeyWrongLastSequenceError):
                    return RecordRevision(following, await self._write(key, following, present.revision))
            elif known is None:
                return present
            known = None
        raise InternalError(f"The record {key} is changed by too many at once.")

    def life_s(self, _record: R) -> int | None:
        """How long a revision is kept if no other follows; None: as long as the bucket keeps any."""
        return None

    async def _write(self, key: str, record: R, revision: int) -> int:
        """Write the revision after `revision`, and return its number, or raise KeyWrongLastSequenceError."""
        data, life_s = codec.encode(record), self.life_s(record)
        if life_s is None:
            return await written(partial(self.bucket.update, key, data, last=revision))
        # nats-py gives a life to the first revision of a key alone
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        subject = f"$KV.{self.name}.{key}"
        publish = partial(self.jetstream.publish, subject, data, headers=expected, msg_ttl=life_s)
        try:
            return (await written(publish)).seq
        except APIError as error:
            if error_code(error) in _WRONG_LAST:
                raise KeyWrongLastSequenceError(description=error.description) from error
            raise

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Forget a record, if it still has `revision`; a record that is not there is no error."""
        await written(lambda: self.bucket.delete(key, last=revision))

    async def matching(self, pattern: str) -> list[R]:
        """Every record whose key matches, in no order.

        The stream is asked for the keys: a watcher of nats-py may say that it has shown all before it has shown any.
        """
        return list((await self._read_each(await self._keys(pattern))).values())

    async def everything(self) -> dict[str, R]:
        """Every record by its key. Many are followed, not asked for one by one, which takes the right to do so."""
        keys = await self._keys(">")
        if len(keys) > MANY:
            with contextlib.suppress(TimeoutError):  # the last ones may have been deleted meanwhile
                return await self._followed()
        return await self._read_each(keys)

    async def _keys(self, pattern: str) -> list[str]:
        keys = f"$KV.{self.name}."
        ask = partial(self.jetstream.stream_info, f"KV_{self.name}", subjects_filter=keys + pattern)
        return [name.removeprefix(keys) for name in (await repeated(ask)).state.subjects or ()]

    async def _read_each(self, keys: Sequence[str]) -> dict[str, R]:
        found: dict[str, R] = {}
        for first in range(0, len(keys), ASKED_AT_ONCE):
            some = keys[first : first + ASKED_AT_ONCE]
            reads = await asyncio.gather(*map(self.found, some))
            found |= {key: record for key, record in zip(some, reads, strict=True) if record is not None}
        return found

    async def _followed(self) -> dict[str, R]:
        found: dict[str, R] = {}
        async with asyncio.timeout(FOLLOWED_S), self._watching(">") as watcher:
            async for entry in watcher:
                if entry is None:
                    continue
                if entry.operation is None and entry.value is not None:
                    found[entry.key] = codec.decode(self.kind, entry.value)
                else:
                    found.pop(entry.key, None)
                if not entry.delta:
                    break
        return found

    async def found(self, key: str) -> R | None:
        """A record, or None."""
        try:
            return await self.get(key)
        except self.missing:  # it was deleted
            return None

    @asynccontextmanager
    async def _watching(self, pattern: str) -> AsyncIterator[KeyValue.KeyWatcher]:
        """Entries of matching keys: the present ones, then every change; None stands somewhere between them."""
        watcher = await repeated(lambda: self.bucket.watch(pattern, inactive_threshold=UNHEARD_S))
        try:
            heed_cancel()
            yield watcher
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]  # nats-py annotates it in part

    async def changes(self, pattern: str) -> AsyncGenerator[tuple[str, R | None], None]:
        """Key and record of each record whose key matches, then of every change; None for a deleted one.

        It never ends by itself, and goes on after a loss of the connection.
        """
        async with self._watching(pattern) as watcher:
            async for entry in watcher:
                if entry is not None:
                    gone = entry.operation is not None or entry.value is None
                    yield entry.key, None if gone else codec.decode(self.kind, entry.value or b"")

    async def until(self, key: str, condition: Callable[[R], bool], deadline: Deadline) -> R:
        """The record as soon as `condition` holds for it, or as it stands at `deadline`."""
        record = await self.get(key)
        if condition(record) or not deadline.remaining_s():
            return record
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s()), self._watching(key) as watcher:
                async for entry in watcher:
                    if entry is None:
                        continue
                    if entry.operation is not None or entry.value is None:
                        raise self._none(key)
                    record = codec.decode(self.kind, entry.value)
                    if condition(record):
                        break
        return record

    def _none(self, key: str) -> GiornataError:
        return self.missing(received=key.rpartition(".")[2])


@dataclass(frozen=True)
class JobRecordStore(RecordBucket[JobRecord]):
    """The bucket of job records, by job id; an unknown id raises JobNotFound. Make it with :meth:`open`.

    The record of an ended job is kept as long as its results, and `linger_s` more.
    """

    linger_s: int = field(default=LINGER_S, kw_only=True)

    @classmethod
    async def open(cls, jetstream: JetStreamContext, *, linger_s: int = LINGER_S) -> JobRecordStore:
        """Open the bucket."""
        bucket = await jetstream.key_value(RECORDS)
        return cls(jetstream, RECORDS, bucket, JobRecord, _job_id, JobNotFound, linger_s=linger_s)

    def life_s(self, record: JobRecord) -> int | None:
        """An unfinished job's record lives as long as the bucket keeps any."""
        return record.job.result_ttl_s + self.linger_s if record.state.terminal else None

    async def revise(
        self, key: str, change: Change[JobRecord], known: RecordRevision[JobRecord] | None = None
    ) -> RecordRevision[JobRecord]:
        """Change a record as in every bucket. A terminal record stays as it is, and `change` is not called."""
        return await super().revise(
            key, lambda record: None if record.state.terminal else change(record), known
        )


class Quarantine(RecordBucket[JobRecord]):
    """Jobs that were given up because every worker that had them was lost: kept, with the causes, for an operator.

    Its keys are job ids; an unknown id raises JobNotFound. Make it with :meth:`open`.
    """

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Quarantine:
        """Open the bucket."""
        bucket = await jetstream.key_value(QUARANTINE)
        return cls(jetstream, QUARANTINE, bucket, JobRecord, _job_id, JobNotFound)

    async def remove(self, job_id: str) -> JobRecord:
        """Forget a job; its record."""
        found = await self.read(job_id)
        await self.delete(job_id, found.revision)
        return found.record

    async def all(self) -> list[JobRecord]:
        """The records of all jobs that are here, ordered by id."""
        return sorted(await self.matching(">"), key=_job_id)


def _job_id(record: JobRecord) -> str:
    return record.job.job_id
