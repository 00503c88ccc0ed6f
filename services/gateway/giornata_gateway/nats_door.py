"""The NATS door: ``giornata.edit``, with ``probe`` and ``cancel`` below it, ``giornata.generate``, ``giornata.mask``.

It is the same path as HTTP behind other envelopes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from giornata.bus.bus import Endpoint
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError, InternalError
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.masks import MaskMessageReply
from giornata.wire.messages import (
    EVENT_HEADER,
    EVENT_TYPES,
    IDEMPOTENCY_HEADER,
    CancelMessage,
    EditReply,
    JobAck,
    Picture,
    StateEvent,
)
from giornata.wire.models import Task
from giornata.wire.permissions import NatsRole, inbox
from giornata_gateway.gateway import Gateway
from giornata_gateway.jobs.feed import ClientEvent, open_feed, until_done
from giornata_gateway.jobs.preparation import EditOrder, StandaloneMask
from giornata_gateway.jobs.submission import AwaitedJob
from giornata_gateway.rules.envelopes import (
    EditEnvelope,
    Envelope,
    GenerateEnvelope,
    MaskEnvelope,
    ProbeEnvelope,
    check_envelope,
    check_mask_image,
    check_pictures,
    check_reply,
    check_time,
    inline_bytes,
    inline_pictures,
    read_generation,
    read_mask,
    read_parameters,
)
from giornata_gateway.rules.forms import check_no_key
from giornata_gateway.rules.idempotency import read_key
from giornata_gateway.rules.tenants import Tenant
from giornata_gateway.views.answers import error_of
from giornata_gateway.views.jobs import forecast_fields
from giornata_gateway.views.resources import mask_made

REPLY_BYTES: Final = 8 << 20
"""No reply is larger, even where the server would carry it."""
MESSAGE_COPIES: Final = 2
"""Pictures inside a message are held as they came and as they were read, until it is answered."""

KINDS: Final = {kind_type: kind for kind, kind_type in EVENT_TYPES.items()}


@asynccontextmanager
async def open_door(gateway: Gateway) -> AsyncIterator[None]:
    """Answer over NATS while inside; on leaving, finish what was delivered."""
    endpoints = NatsEndpoints(gateway, min(REPLY_BYTES, gateway.bus.client.max_payload))

    def counting(endpoint: Endpoint) -> Endpoint:
        return replace(endpoint, unread=partial(_unread, gateway, endpoint.subject))

    asks = partial(Endpoint, limit_bytes=endpoints.limit_bytes, headers=True, reply=True, door=True)
    keyed = partial(asks, admit=endpoints.check_asker)
    edit = counting(keyed(subjects.EDIT, EditEnvelope, endpoints.edit))
    probe = counting(asks(subjects.EDIT_PROBE, ProbeEnvelope, endpoints.probe))
    generate = counting(keyed(subjects.GENERATE, GenerateEnvelope, endpoints.generate))
    mask = counting(keyed(subjects.MASK, MaskEnvelope, endpoints.mask))
    cancel = Endpoint(
        subjects.EDIT_CANCEL, CancelMessage, endpoints.cancel, reply=True, admit=endpoints.check_asker
    )
    cancel = counting(cancel)
    answered = (edit, probe, generate, mask, cancel)
    async with gateway.bus.serve("gateway", *answered, instance=gateway.config.instance):
        yield


@dataclass(frozen=True)
class NatsEndpoints:
    """Handlers of the endpoints."""

    gateway: Gateway
    limit_bytes: int
    """The largest reply on this server."""

    async def edit(self, envelope: EditEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit. A caller that sets `progress` is told its events there, from *queued* on."""
        with _counted(self.gateway, subjects.EDIT):
            return await self._edit(envelope, self._asker(envelope.api_key, reply), headers)

    async def probe(self, envelope: ProbeEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit for the profiler, as the tenant that it names; the server lets nobody else ask."""
        with _counted(self.gateway, subjects.EDIT_PROBE):
            tenant = Tenant(envelope.tenant, inbox=inbox(NatsRole.PROFILER))
            check_reply(reply, tenant)
            return await self._edit(envelope, tenant, headers)

    async def _edit(self, envelope: EditEnvelope, tenant: Tenant, headers: Mapping[str, str]) -> EditReply:
        key, parameters = _key(headers), read_parameters(envelope)
        check_envelope(envelope, tenant)
        check_pictures(envelope, tenant, self.gateway.config.max_file_bytes)
        order = EditOrder(
            parameters,
            envelope.image,
            envelope.mask,
            tenant,
            envelope.priority,
            self._deadline(envelope),
            template_id=envelope.template_id,
            references=envelope.reference,
            control_images=envelope.control_image,
        )
        return await self._carried_out(order, key, envelope.progress, inline_bytes(envelope))

    async def generate(self, envelope: GenerateEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Make pictures from text; `progress` is as an edit's."""
        with _counted(self.gateway, subjects.GENERATE):
            tenant, key = self._asker(envelope.api_key, reply), _key(headers)
            parameters = read_generation(envelope)
            check_envelope(envelope, tenant)
            check_pictures(envelope, tenant, self.gateway.config.max_file_bytes)
            order = EditOrder(
                parameters,
                None,
                None,
                tenant,
                envelope.priority,
                self._deadline(envelope),
                task=Task.GENERATE,
                references=envelope.reference,
                control_images=envelope.control_image,
            )
            return await self._carried_out(order, key, envelope.progress, inline_bytes(envelope))

    async def mask(self, envelope: MaskEnvelope, headers: Mapping[str, str], reply: str) -> MaskMessageReply:
        """Find what words name. It counts as a picture; masks that do not fit into the answer are kept as results."""
        gateway = self.gateway
        with _counted(gateway, subjects.MASK):
            tenant = self._asker(envelope.api_key, reply)
            check_no_key(headers, IDEMPOTENCY_HEADER)
            asked = read_mask(envelope)
            check_time(envelope.remaining_ms)
            check_mask_image(envelope, tenant, gateway.config.max_file_bytes)
            deadline = Deadline.after_ms(envelope.remaining_ms).at_most(gateway.config.budget_s)
            with gateway.uploads.growing(tenant) as grow:
                grow(MESSAGE_COPIES * inline_bytes(envelope))
                async with gateway.shown(tenant, asked, envelope.image, deadline) as shown:
                    return await self._mask_made(shown, tenant)

    async def cancel(self, message: CancelMessage, reply: str) -> JobAck:
        """Cancel a job of the caller's tenant; one that has ended stays as it is."""
        gateway = self.gateway
        with _counted(gateway, subjects.EDIT_CANCEL):
            tenant = self._asker(message.api_key, reply)
            record = await gateway.ledger.read_of(tenant.name, message.job_id)
            await gateway.ledger.cancel(record.job.job_id)
            return JobAck(job_id=record.job.job_id)

    def _deadline(self, envelope: Envelope) -> Deadline:
        return Deadline.after_ms(envelope.remaining_ms).at_most(self.gateway.config.job_budget_s)

    async def _carried_out(
        self, order: EditOrder, key: str | None, progress: str | None, inline: int
    ) -> EditReply:
        """The answer of an order whose message holds `inline` bytes of pictures."""
        gateway = self.gateway
        with gateway.uploads.growing(order.tenant) as grow, ExitStack() as held:
            grow(MESSAGE_COPIES * inline)
            admitted = await gateway.admit(order, key, held)
            async with gateway.awaited(admitted, streamed=progress is not None) as awaited:
                if admitted.stay.repeated:
                    gateway.metrics.repeated("nats")
                if progress is not None:
                    await self._relay(awaited, progress)
                record = await gateway.submission.outcome(awaited)
            admitted.carried_out()
        return await self._reply(record, order.tenant)

    def check_asker(self, fields: Mapping[str, object], reply: str) -> None:
        """Raise Unauthorized or InvalidField where the key in a message's fields does not let it ask for an answer."""
        key = fields.get("api_key")
        self._asker(key if isinstance(key, str) else None, reply)

    def _asker(self, key: str | None, reply: str) -> Tenant:
        """The tenant that asks. NATS does not tell the sender, so the key says whose inbox the answer may go to."""
        tenant = self.gateway.tenant(key)
        check_reply(reply, tenant)
        return tenant

    async def _relay(self, awaited: AwaitedJob, subject: str) -> None:
        """Publish the job's events to `subject` until its last one.

        *Queued* comes first and tells the job's id and what the status of a job tells at the HTTP door.
        """
        gateway, job_id = self.gateway, awaited.job.job_id
        queued = StateEvent(job_id=job_id, state=JobState.QUEUED, attempt=0)
        told = forecast_fields(await gateway.ledger.forecast(job_id))
        await self._publish(subject, queued.model_copy(update=told))
        async with open_feed(gateway.bus, job_id, 0, gateway.restore, awaited.steps) as events:
            async for item in until_done(events, awaited.ended, gateway.config.heartbeat_s, awaited.deadline):
                if item is not None and item.event != queued:
                    await self._publish(subject, item.event)

    async def _publish(self, subject: str, event: ClientEvent) -> None:
        await self.gateway.bus.client.publish(
            subject, codec.encode(event), headers={EVENT_HEADER: KINDS[type(event)]}
        )

    async def _mask_made(self, shown: StandaloneMask, tenant: Tenant) -> MaskMessageReply:
        pictures = shown.pictures
        sizes = {index: ref.size_bytes for index, ref in enumerate(pictures)}
        inline = [pictures[index] for index in inline_pictures(sizes, self.limit_bytes)]
        async with self.gateway.answers.room(tenant, MESSAGE_COPIES * sum(ref.size_bytes for ref in inline)):
            pngs = {ref.key: await self.gateway.blobs.get(ref) for ref in inline}
        shown.handed.update(ref.key for ref in pictures if ref.key not in pngs)
        return mask_made(shown.reply, pngs)

    async def _reply(self, record: JobRecord, tenant: Tenant) -> EditReply:
        error = error_of(record)
        if error is not None:
            raise error
        inspection, encoding = record.inspection, record.encoding
        if inspection is None:
            raise InternalError("A completed job has no inspection.", received=record.job.job_id)
        refs = {row.index: row.image for row in record.images if row.image is not None}
        inline = inline_pictures({index: ref.size_bytes for index, ref in refs.items()}, self.limit_bytes)
        room_bytes = MESSAGE_COPIES * sum(refs[index].size_bytes for index in inline)
        async with self.gateway.answers.room(tenant, room_bytes):
            pictures = [
                Picture(
                    index=row.index,
                    seed=row.seed,
                    data=await self.gateway.picture(refs[row.index]) if row.index in inline else None,
                    ref=None if row.index in inline else refs[row.index],
                    loras_from=row.loras_from,
                )
                for row in record.images
            ]
        return EditReply(
            job_id=record.job.job_id,
            width=inspection.output_width,
            height=inspection.output_height,
            output_format=record.job.parameters.output_format,
            pictures=tuple(pictures),
            prompt_tokens=None if encoding is None else encoding.prompt_tokens,
            negative_prompt_tokens=None if encoding is None else encoding.negative_prompt_tokens,
            errors=tuple(f"Picture {row.index}: {row.error.message}" for row in record.rows if row.error),
        )


def _key(headers: Mapping[str, str]) -> str | None:
    """The idempotency key of a message."""
    given = [headers[IDEMPOTENCY_HEADER]] if IDEMPOTENCY_HEADER in headers else []
    return read_key(given, IDEMPOTENCY_HEADER)


def _unread(gateway: Gateway, route: str, error: GiornataError) -> None:
    """Count a message that is no request."""
    gateway.metrics.answered("nats", route, error.status, error.code, 0.0)


@contextmanager
def _counted(gateway: Gateway, route: str) -> Iterator[None]:
    """Count one request and how it ended."""
    started = time.monotonic()
    status, code = 500, "internal_error"
    try:
        yield
        status, code = 200, "ok"
    except GiornataError as error:
        status, code = error.status, error.code
        raise
    except asyncio.CancelledError:
        status, code = 504, "deadline_exceeded"
        raise
    finally:
        gateway.metrics.answered("nats", route, status, code, time.monotonic() - started)
