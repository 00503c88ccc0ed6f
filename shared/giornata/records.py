"""Records in JetStream's key-value buckets: jobs, those that were given up, and what belongs to tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import (
    APIError,
    InvalidKeyError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NotFoundError,
)
from nats.js.kv import KeyValue
from pydantic import BaseModel

from giornata.bus.connection import ask_jetstream, error_code, write_to_jetstream
from giornata.bus.streams import LINGER_S, is_full
from giornata.deadlines import Deadline, heed_cancel
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    GiornataError,
    InternalError,
    JobNotFound,
    LoraNotFound,
    StoreFull,
    TemplateNotFound,
    WebhookNotFound,
)
from giornata.wire.jobs import JobRecord
from giornata.wire.loras import EVERYONE, LoraRecord
from giornata.wire.subjects import LORAS, QUARANTINE, RECORDS, TEMPLATES, WEBHOOKS, bucket_stream
from giornata.wire.templates import TemplateRecord, WebhookRecord

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
    may_write: Callable[[], object] = field(default=lambda: None, kw_only=True)
    """Is called before each write, and raises where this process may write no more."""

    async def read(self, key: str) -> RecordRevision[R]:
        """The present revision of a record."""
        try:
            entry = await ask_jetstream(lambda: self.bucket.get(key))
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
        self.may_write()
        try:
            return await write_to_jetstream(
                lambda: self.bucket.create(self.key_of(record), codec.encode(record))
            )
        except KeyWrongLastSequenceError:
            return None
        except APIError as error:
            if error_code(error) != _STORE_FAILED or is_full(error):
                raise
            raise StoreFull(received=self.key_of(record), retry_after_s=FULL_RETRY_S) from error

    async def put(self, record: R) -> int:
        """Write a record, whether there is one or not, and return the number of its revision."""
        self.may_write()
        return await write_to_jetstream(lambda: self.bucket.put(self.key_of(record), codec.encode(record)))

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
        """Return how long a revision is kept if no other follows; None: as long as the bucket keeps any."""
        return None

    async def _write(self, key: str, record: R, revision: int) -> int:
        """Write the revision after `revision`, and return its number, or raise KeyWrongLastSequenceError."""
        self.may_write()
        data, life_s = codec.encode(record), self.life_s(record)
        if life_s is None:
            return await write_to_jetstream(partial(self.bucket.update, key, data, last=revision))
        # nats-py gives a life to the first revision of a key alone
        expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        subject = f"$KV.{self.name}.{key}"
        publish = partial(self.jetstream.publish, subject, data, headers=expected, msg_ttl=life_s)
        try:
            return (await write_to_jetstream(publish)).seq
        except APIError as error:
            if error_code(error) in _WRONG_LAST:
                raise KeyWrongLastSequenceError(description=error.description) from error
            raise

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Forget a record, if it still has `revision`; a record that is not there is no error."""
        await write_to_jetstream(lambda: self.bucket.delete(key, last=revision))

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
        return [name.removeprefix(keys) for name in (await ask_jetstream(ask)).state.subjects or ()]

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
                if (record := self._told(entry)) is not None:
                    found[entry.key] = record
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
        watcher = await ask_jetstream(lambda: self.bucket.watch(pattern, inactive_threshold=UNHEARD_S))
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
                    yield entry.key, self._told(entry)

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
                    if (told := self._told(entry)) is None:
                        raise self._none(key)
                    record = told
                    if condition(record):
                        break
        return record

    def _told(self, entry: KeyValue.Entry) -> R | None:
        """The record in an entry; None where it tells that the record was deleted."""
        if entry.operation is not None or entry.value is None:
            return None
        return codec.decode(self.kind, entry.value)

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
        self.seen = 0
        """What :meth:`refresh` has read up to, in the bucket's stream; the records are the same while it is."""
        self._refreshing = asyncio.Lock()

    def of(self, owner: str) -> list[R]:
        """An owner's records as of the last :meth:`refresh`, in no order."""
        return list(self._owners.get(owner, {}).values())

    def all(self) -> list[R]:
        """Every owner's records, as :meth:`of`."""
        return [record for owned in self._owners.values() for record in owned.values()]

    async def refresh(self) -> None:
        """Take every change that was acknowledged before the call."""
        async with self._refreshing:
            last = (
                await ask_jetstream(partial(self._bucket.jetstream.stream_info, self._stream))
            ).state.last_seq
            behind = last - self.seen
            if behind < 0 or behind > FEW + sum(map(len, self._owners.values())):
                self._owners = _keep({}, (await self._bucket.everything()).items())  # made again, or quicker
            elif behind:
                await self._read_changes(last)
            self.seen = last

    async def _read_changes(self, last: int) -> None:
        sequence = self.seen
        while sequence < last:
            ask = partial(
                self._bucket.jetstream.get_msg, self._stream, sequence + 1, f"{self._keys}>", next=True
            )
            try:
                message = await ask_jetstream(ask)
            except NotFoundError:  # what followed has been removed
                return
            sequence, key = message.seq or last, (message.subject or "").removeprefix(self._keys)
            gone = message.data is None or _OPERATION in (message.headers or {})
            _keep(
                self._owners, [(key, None if gone else codec.decode(self._bucket.kind, message.data or b""))]
            )


def _keep(
    owners: dict[str, dict[str, R]], records: Iterable[tuple[str, R | None]]
) -> dict[str, dict[str, R]]:
    """Put records in their places by key, and return the places; None removes one."""
    for key, record in records:
        owned = owners.setdefault(key.partition(".")[0], {})
        if record is None:
            owned.pop(key, None)
        else:
            owned[key] = record
    return owners


@dataclass(frozen=True)
class TenantRecords(Generic[R]):
    """A bucket of records by tenant and id; where there is none, the bucket's own error is raised."""

    bucket: RecordBucket[R]
    name: ClassVar[str]
    kind: ClassVar[type[Any]]
    id_field: ClassVar[str]
    missing: ClassVar[type[GiornataError]]

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> Self:
        """The bucket of a connection."""

        def key_of(record: Any) -> str:
            return cls._key(record.tenant, getattr(record, cls.id_field))

        found = await jetstream.key_value(cls.name)
        return cls(RecordBucket(jetstream, cls.name, found, cls.kind, key_of, cls.missing))

    async def get(self, tenant: str, name: str) -> R:
        """A tenant's record."""
        return await self.bucket.get(self._key(tenant, name))

    async def create(self, record: R) -> bool:
        """Write the first revision; False if there is a record already."""
        return await self.bucket.create(record) is not None

    async def change(self, tenant: str, name: str, change: Change[R]) -> R:
        """Change a record as in every bucket."""
        return await self.bucket.change(self._key(tenant, name), change)

    async def delete(self, record: R) -> None:
        """Forget the record; a record that is not there is no error."""
        await self.bucket.delete(self.bucket.key_of(record))

    async def all_of(self, tenant: str) -> list[R]:
        """Every record of a tenant, the newest first."""
        found = await self.bucket.matching(f"{owner_of(tenant)}.*")
        return sorted(found, key=attrgetter("created_s", self.id_field), reverse=True)

    async def until(self, tenant: str, name: str, condition: Callable[[R], bool], deadline: Deadline) -> R:
        """The record as soon as `condition` holds for it, or as it stands at the deadline."""
        return await self.bucket.until(self._key(tenant, name), condition, deadline)

    @classmethod
    def _key(cls, tenant: str, name: str) -> str:
        try:
            return f"{owner_of(tenant)}.{subjects.token(name)}"
        except ValueError as error:
            raise cls.missing(received=name) from error


class TemplateRecords(TenantRecords[TemplateRecord]):
    """The registered templates, or TemplateNotFound. Make it with :meth:`open`."""

    name, kind, id_field, missing = TEMPLATES, TemplateRecord, "template_id", TemplateNotFound


class LoraRecords(TenantRecords[LoraRecord]):
    """The LoRAs and their uploads, or LoraNotFound. Make it with :meth:`open`."""

    name, kind, id_field, missing = LORAS, LoraRecord, "lora_id", LoraNotFound

    async def all(self) -> list[LoraRecord]:
        """Every record of every tenant, in no order."""
        return list((await self.bucket.everything()).values())


class WebhookRecords(TenantRecords[WebhookRecord]):
    """The webhooks that were not taken yet, by their jobs, or WebhookNotFound. Make it with :meth:`open`."""

    name, kind, id_field, missing = WEBHOOKS, WebhookRecord, "job_id", WebhookNotFound


def owner_of(tenant: str) -> str:
    """The first token of the keys of a tenant's records; ValueError for a name that no tenant can have."""
    return tenant if tenant == EVERYONE else subjects.token(tenant)
