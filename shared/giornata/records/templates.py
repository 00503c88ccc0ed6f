"""Registered templates in JetStream's key-value store: read, create, change by revision, list, wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from giornata.bus.patience import repeated, written
from giornata.bus.streams import TEMPLATES
from giornata.deadlines import Deadline
from giornata.records.jobs import MAX_CONFLICTS
from giornata.wire import codec, subjects
from giornata.wire.errors import InternalError, TemplateNotFound
from giornata.wire.templates import TemplateRecord

Change = Callable[[TemplateRecord], TemplateRecord | None]
"""A pure function from the present record to the next, or None to leave it as it is."""


class TemplateRecords:
    """The bucket of registered templates; a key is a tenant and an id. Make it with :meth:`open`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> TemplateRecords:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(TEMPLATES))

    async def get(self, tenant: str, template_id: str) -> TemplateRecord:
        """A tenant's template.

        Raises:
            TemplateNotFound: the tenant has none of this id.
        """
        record, _ = await self._read(tenant, template_id)
        return record

    async def create(self, record: TemplateRecord) -> bool:
        """Write the first revision; False if the template has a record already."""
        try:
            key = _key(record.tenant, record.template_id)
            await written(lambda: self._bucket.create(key, codec.encode(record)))
        except KeyWrongLastSequenceError:
            return False
        return True

    async def change(self, tenant: str, template_id: str, change: Change) -> TemplateRecord:
        """Apply `change` to the present record and write the result, again if somebody else was faster.

        Returns:
            The record as it stands afterwards.

        Raises:
            TemplateNotFound: there is no record.
        """
        key = _key(tenant, template_id)
        for _ in range(MAX_CONFLICTS):
            record, revision = await self._read(tenant, template_id)
            following = change(record)
            if following is None or following == record:
                return record
            try:
                data = codec.encode(following)
                await written(partial(self._bucket.update, key, data, last=revision))
            except KeyWrongLastSequenceError:
                continue
            return following
        raise InternalError(f"The record of {template_id} is changed by too many at once.")

    async def delete(self, record: TemplateRecord) -> None:
        """Forget the record; what is not there is no error."""
        await written(lambda: self._bucket.delete(_key(record.tenant, record.template_id)))

    async def all_of(self, tenant: str) -> list[TemplateRecord]:
        """Every template of a tenant, in no order."""
        found: list[TemplateRecord] = []
        async with self._watching(f"{subjects.token(tenant)}.*") as watcher:
            async for entry in watcher:
                if entry is None:  # all that there was
                    break
                if entry.operation is None and entry.value is not None:
                    found.append(codec.decode(TemplateRecord, entry.value))
        return found

    async def until(
        self, tenant: str, template_id: str, condition: Callable[[TemplateRecord], bool], deadline: Deadline
    ) -> TemplateRecord:
        """The record as soon as `condition` holds for it, or as it stands at the deadline.

        Raises:
            TemplateNotFound: there is none, or no more.
        """
        record = await self.get(tenant, template_id)
        if condition(record) or not deadline.remaining_s():
            return record
        try:
            async with (
                asyncio.timeout(deadline.remaining_s()),
                self._watching(_key(tenant, template_id)) as watcher,
            ):
                async for entry in watcher:
                    if entry is None:
                        continue
                    if entry.operation is not None or entry.value is None:
                        raise TemplateNotFound(received=template_id)
                    record = codec.decode(TemplateRecord, entry.value)
                    if condition(record):
                        break
        except TimeoutError:
            pass
        return record

    @asynccontextmanager
    async def _watching(self, pattern: str) -> AsyncIterator[KeyValue.KeyWatcher]:
        watcher = await repeated(lambda: self._bucket.watch(pattern))
        try:
            yield watcher
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]  # nats-py annotates it in part

    async def _read(self, tenant: str, template_id: str) -> tuple[TemplateRecord, int]:
        try:
            key = _key(tenant, template_id)
            entry = await repeated(lambda: self._bucket.get(key))
        except KeyNotFoundError as error:
            raise TemplateNotFound(received=template_id) from error
        if entry.value is None or entry.revision is None:
            raise TemplateNotFound(received=template_id)
        return codec.decode(TemplateRecord, entry.value), entry.revision


def _key(tenant: str, template_id: str) -> str:
    try:
        return f"{subjects.token(tenant)}.{subjects.token(template_id)}"
    except ValueError as error:
        raise TemplateNotFound(received=template_id) from error
