"""The NATS door: ``giornata.edit``, with ``probe`` and ``cancel`` below it, ``giornata.generate``, ``giornata.mask``.

It is the same path as HTTP behind other envelopes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from giornata.bus.bus import Endpoint
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError, InternalError
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import (
    EVENT_HEADER,
    EVENT_TYPES,
    IDEMPOTENCY_HEADER,
    CancelMessage,
    EditReply,
    JobAck,
    MaskMessageReply,
    Picture,
    StateEvent,
)
from giornata.wire.models import Task
from giornata.wire.subjects import NatsRole, inbox
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
    check_reply,
    check_time,
    inline_bytes,
    inline_pictures,
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
    asks = partial(Endpoint, limit_bytes=endpoints.limit_bytes, headers=True, reply=True, door=True)
    keyed = partial(asks, admit=endpoints.check_asker)
    answered = (
        keyed(subjects.EDIT, EditEnvelope, endpoints.edit),
        asks(subjects.EDIT_PROBE, ProbeEnvelope, endpoints.probe),
        keyed(subjects.GENERATE, GenerateEnvelope, endpoints.edit),
        keyed(subjects.MASK, MaskEnvelope, endpoints.mask),
        Endpoint(
            subjects.EDIT_CANCEL, CancelMessage, endpoints.cancel, reply=True, admit=endpoints.check_asker
        ),
    )
    counted = [_counted(gateway, endpoint) for endpoint in answered]
    async with gateway.bus.serve("gateway", *counted, instance=gateway.config.instance):
        yield


@dataclass(frozen=True)
class NatsEndpoints:
    """Handlers of the endpoints."""

    gateway: Gateway
    limit_bytes: int
    """The largest reply on this server."""

    async def edit(self, envelope: Envelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit or a generation. Its events go to the subject `progress`, from *queued* on."""
        return await self._carried_out(envelope, self._asker(envelope.api_key, reply), headers)

    async def probe(self, envelope: ProbeEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit for the profiler, as the tenant that it names; the server lets nobody else ask."""
        tenant = Tenant(envelope.tenant, inbox=inbox(NatsRole.PROFILER))
        check_reply(reply, tenant)
        return await self._carried_out(envelope, tenant, headers)

    async def _carried_out(self, envelope: Envelope, tenant: Tenant, headers: Mapping[str, str]) -> EditReply:
        gateway = self.gateway
        given = [headers[IDEMPOTENCY_HEADER]] if IDEMPOTENCY_HEADER in headers else []
        key, parameters = read_key(given, IDEMPOTENCY_HEADER), read_parameters(envelope)
        check_envelope(envelope, tenant, gateway.config.max_file_bytes)
        edited = envelope if isinstance(envelope, EditEnvelope) else None
        order = EditOrder(
            parameters,
            edited.image if edited else None,
            edited.mask if edited else None,
            tenant,
            envelope.priority,
            Deadline.after_ms(envelope.remaining_ms).at_most(gateway.config.job_budget_s),
            template_id=edited.template_id if edited else None,
            task=Task.EDIT if edited else Task.GENERATE,
            references=envelope.reference,
            control_images=envelope.control_image,
        )
        with gateway.uploads.growing(tenant) as grow, ExitStack() as held:
            grow(MESSAGE_COPIES * inline_bytes(envelope))
            admitted = await gateway.admit(order, key, held)
            streamed = envelope.progress is not None
            async with gateway.submission.awaited(admitted, streamed=streamed) as awaited:
                if admitted.stay.repeated:
                    gateway.metrics.repeated.labels("nats").inc()
                if envelope.progress is not None:
                    await self._relay(awaited, envelope.progress)
                record = await gateway.submission.outcome(awaited)
            admitted.carried_out()
        return await self._reply(record, tenant)

    async def mask(self, envelope: MaskEnvelope, headers: Mapping[str, str], reply: str) -> MaskMessageReply:
        """Find what words name. It counts as a picture; masks that do not fit into the answer are kept as results."""
        gateway, tenant = self.gateway, self._asker(envelope.api_key, reply)
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
        tenant, ledger = self._asker(message.api_key, reply), self.gateway.ledger
        record = await ledger.read_of(tenant.name, message.job_id)
        await ledger.cancel(record.job.job_id)
        return JobAck(job_id=record.job.job_id)

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


def _counted(gateway: Gateway, endpoint: Endpoint) -> Endpoint:
    """The endpoint, each of whose requests is counted with how it ended; so is a message that is no request."""

    def count(status: int, code: str, seconds: float) -> None:
        gateway.metrics.answered("nats", endpoint.subject, status, code, seconds)

    async def handle(*arguments: Any) -> Any:
        started = time.monotonic()
        status, code = InternalError.status, InternalError.code
        try:
            answer = await endpoint.handler(*arguments)
            status, code = 200, "ok"
        except GiornataError as error:
            status, code = error.status, error.code
            raise
        except asyncio.CancelledError:
            status, code = DeadlineExceeded.status, DeadlineExceeded.code
            raise
        finally:
            count(status, code, time.monotonic() - started)
        return answer

    return replace(endpoint, handler=handle, unread=lambda error: count(error.status, error.code, 0.0))
