"""Records of registered templates: read, create, change by revision, list, wait for."""

from __future__ import annotations

from collections.abc import Callable

from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from giornata.deadlines import Deadline
from giornata.records.bucket import RecordBucket
from giornata.wire import subjects
from giornata.wire.errors import TemplateNotFound
from giornata.wire.stores import TEMPLATES
from giornata.wire.templates import TemplateRecord

Change = Callable[[TemplateRecord], TemplateRecord | None]
"""A pure function from the present record to the next, or None to leave it as it is."""


class TemplateRecords:
    """The bucket of registered templates; a key is a tenant and an id. Make it with :meth:`open`.

    Where a tenant has no template of an id, or has it no more, TemplateNotFound is raised.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self._records = RecordBucket(bucket, TemplateRecord, TemplateNotFound)

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> TemplateRecords:
        """Bind to the bucket that :func:`giornata.bus.streams.ensure` made."""
        return cls(await jetstream.key_value(TEMPLATES))

    async def get(self, tenant: str, template_id: str) -> TemplateRecord:
        """A tenant's template."""
        return (await self._records.read(_key(tenant, template_id)))[0]

    async def create(self, record: TemplateRecord) -> bool:
        """Write the first revision; False if the template has a record already."""
        return await self._records.create(_key(record.tenant, record.template_id), record)

    async def change(self, tenant: str, template_id: str, change: Change) -> TemplateRecord:
        """Apply `change` to the present record and write the result, again if another writer was faster.

        Returns:
            The record as it stands afterwards.
        """
        return await self._records.change(_key(tenant, template_id), change)

    async def delete(self, record: TemplateRecord) -> None:
        """Forget the record; a record that is not there is no error."""
        await self._records.delete(_key(record.tenant, record.template_id))

    async def all_of(self, tenant: str) -> list[TemplateRecord]:
        """Every template of a tenant, in no order."""
        return await self._records.matching(f"{subjects.token(tenant)}.*")

    async def until(
        self, tenant: str, template_id: str, condition: Callable[[TemplateRecord], bool], deadline: Deadline
    ) -> TemplateRecord:
        """The record as soon as `condition` holds for it, or as it stands at the deadline."""
        return await self._records.until(_key(tenant, template_id), condition, deadline)


def _key(tenant: str, template_id: str) -> str:
    try:
        return f"{subjects.token(tenant)}.{subjects.token(template_id)}"
    except ValueError as error:
        raise TemplateNotFound(received=template_id) from error
