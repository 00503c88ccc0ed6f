"""Records that belong to tenants: registered templates, LoRAs and webhooks, in JetStream's key-value buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.js import JetStreamContext
from pydantic import BaseModel

from giornata.deadlines import Deadline
from giornata.records import Change, RecordBucket
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, LoraNotFound, TemplateNotFound, WebhookNotFound
from giornata.wire.loras import EVERYONE, LoraRecord
from giornata.wire.stores import LORAS, TEMPLATES, WEBHOOKS
from giornata.wire.templates import TemplateRecord
from giornata.wire.webhooks import WebhookRecord

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class TenantRecords(Generic[R]):
    """A bucket of records by tenant and id; where there is none, the bucket's own error is raised."""

    bucket: RecordBucket[R]

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
        """Every record of a tenant, in no order."""
        return await self.bucket.matching(f"{owner_of(tenant)}.*")

    async def until(self, tenant: str, name: str, condition: Callable[[R], bool], deadline: Deadline) -> R:
        """The record as soon as `condition` holds for it, or as it stands at the deadline."""
        return await self.bucket.until(self._key(tenant, name), condition, deadline)

    def _key(self, tenant: str, name: str) -> str:
        return _key(tenant, name, self.bucket.missing)


class TemplateRecords(TenantRecords[TemplateRecord]):
    """The registered templates, or TemplateNotFound. Make it with :meth:`open`."""

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> TemplateRecords:
        """The bucket of a connection."""
        bucket = await jetstream.key_value(TEMPLATES)
        return cls(
            RecordBucket(jetstream, TEMPLATES, bucket, TemplateRecord, _template_key, TemplateNotFound)
        )


class LoraRecords(TenantRecords[LoraRecord]):
    """The LoRAs and their uploads, or LoraNotFound. Make it with :meth:`open`."""

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> LoraRecords:
        """The bucket of a connection."""
        bucket = await jetstream.key_value(LORAS)
        return cls(RecordBucket(jetstream, LORAS, bucket, LoraRecord, _lora_key, LoraNotFound))

    async def all(self) -> list[LoraRecord]:
        """Every record of every tenant, in no order."""
        return list((await self.bucket.everything()).values())


class WebhookRecords(TenantRecords[WebhookRecord]):
    """The webhooks that were not taken yet, by their jobs, or WebhookNotFound. Make it with :meth:`open`."""

    @classmethod
    async def open(cls, jetstream: JetStreamContext) -> WebhookRecords:
        """The bucket of a connection."""
        bucket = await jetstream.key_value(WEBHOOKS)
        return cls(RecordBucket(jetstream, WEBHOOKS, bucket, WebhookRecord, _webhook_key, WebhookNotFound))


def _webhook_key(record: WebhookRecord) -> str:
    return _key(record.tenant, record.job_id, WebhookNotFound)


def _template_key(record: TemplateRecord) -> str:
    return _key(record.tenant, record.template_id, TemplateNotFound)


def _lora_key(record: LoraRecord) -> str:
    return _key(record.tenant, record.lora_id, LoraNotFound)


def _key(tenant: str, name: str, missing: type[GiornataError]) -> str:
    try:
        return f"{owner_of(tenant)}.{subjects.token(name)}"
    except ValueError as error:
        raise missing(received=name) from error


def owner_of(tenant: str) -> str:
    """The first token of the keys of a tenant's records; ValueError for a name that no tenant can have."""
    return tenant if tenant == EVERYONE else subjects.token(tenant)
