"""The NATS door: ``giornata.edit``, with ``probe`` and ``cancel`` below it, ``giornata.generate``, ``giornata.mask``.

It is the same path as HTTP behind other envelopes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pydantic import ConfigDict

from giornata.api_keys import Tenant as TenantName
from giornata.bus.bus import Endpoint
from giornata.deadlines import Deadline
from giornata.wire import codec, resolution, subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError, InternalError, InvalidField, PayloadTooLarge
from giornata.wire.jobs import BlobRef, JobRecord, JobState
from giornata.wire.messages import (
    EVENT_HEADER,
    EVENT_TYPES,
    IDEMPOTENCY_HEADER,
    INLINE_BYTES,
    CancelMessage,
    EditMessage,
    EditReply,
    GenerateMessage,
    JobAck,
    MaskMessage,
    MaskMessageReply,
    MaskParameters,
    Picture,
    StateEvent,
)
from giornata.wire.models import Task
from giornata.wire.requests import (
    REFERENCE,
    EditParameters,
    GenerationParameters,
    asked,
    check_count,
    named_control_images,
)
from giornata.wire.subjects import NatsRole, inbox
from giornata_gateway.admission import Tenant
from giornata_gateway.gateway import Gateway
from giornata_gateway.jobs.events import ClientEvent, open_feed, until_done
from giornata_gateway.jobs.preparation import HEADER as IDEMPOTENCY_KEY
from giornata_gateway.jobs.preparation import EditOrder, read_key
from giornata_gateway.jobs.submission import AwaitedJob
from giornata_gateway.rules.forms import TemplateId, check_filled, check_no_key, check_source
from giornata_gateway.views.jobs import error_of, forecast_fields
from giornata_gateway.views.resources import mask_made
from giornata_gateway.webhooks import WEBHOOK

REPLY_MARGIN_BYTES: Final = 64 << 10
"""Room in a reply for everything but the pictures."""

MAX_PARAMETERS: Final = 64
NAME_CHARACTERS: Final = 64
KEY_NAMES: Final = frozenset({"idempotency_key", IDEMPOTENCY_HEADER, IDEMPOTENCY_KEY})
"""What callers may take for the name of an idempotency key."""

_TOKENS = re.compile(r"(\.[A-Za-z0-9_-]{1,64}){1,6}\Z")


Brought = list[tuple[str, bytes | BlobRef]]
"""Pictures of a message, each with the field that it came in."""


class GenerateEnvelope(GenerateMessage):
    """A generation's message whose parameters are still to be validated, field by field."""

    model_config = ConfigDict(extra="allow")  # for _check_places; a name that means nothing here is ignored

    parameters: Any
    """A map; :func:`read_parameters` validates it, and its errors are short."""
    webhook: Any = None
    """Named to be refused."""

    @property
    def brought(self) -> Brought:
        """Its references and control images."""
        references: Brought = [(REFERENCE, one) for one in self.reference]
        return references + list(named_control_images(self.control_image).items())


class EditEnvelope(GenerateEnvelope, EditMessage):
    """An edit's message whose parameters are still to be validated, field by field."""

    model_config = ConfigDict(extra="allow")  # as a generation's; the message's own would win

    template_id: TemplateId | None = None

    @property
    def brought(self) -> Brought:
        """Its image and mask, then as a generation's."""
        own = {"image": self.image, "mask": self.mask}
        return [(name, one) for name, one in own.items() if one is not None] + super().brought


class ProbeEnvelope(EditEnvelope):
    """The message of a :class:`~giornata.wire.messages.ProbeMessage` whose parameters are still to be validated."""

    tenant: TenantName


class MaskEnvelope(MaskMessage):
    """The message of a mask from words whose parameters are still to be validated, field by field."""

    parameters: Any
    """A map; :func:`read_mask` validates it, and its errors are short."""

    @property
    def brought(self) -> Brought:
        """The picture in which words are looked for."""
        return [("image", self.image)]


def read_parameters(envelope: GenerateEnvelope) -> EditParameters:
    """The parameters with which a job is carried out; an error names the field at fault, with at most a short value."""
    edits = isinstance(envelope, EditEnvelope)
    given = _named(envelope.parameters)
    webhook = envelope.webhook if envelope.webhook is not None else given.get(WEBHOOK)
    if webhook is not None:
        raise InvalidField(
            "The answer to this message tells the end, so there is no webhook of it.",
            field=WEBHOOK,
            received=webhook if isinstance(webhook, str) else type(webhook).__name__,
            accepted="no webhook; a job of POST /v1/jobs may have one",
        )
    _check_places(envelope)
    parameters = asked(EditParameters if edits else GenerationParameters, given)
    if parameters.partial_images and envelope.progress is None:
        raise InvalidField(
            "Partial images are told as progress.",
            field="partial_images",
            received=parameters.partial_images,
            accepted="0, or a subject for the progress",
        )
    return parameters if isinstance(parameters, EditParameters) else resolution.carried_out(parameters)


def read_mask(envelope: MaskEnvelope) -> MaskParameters:
    """Return what a mask is to show; raises as :func:`read_parameters`."""
    return asked(MaskParameters, _named(envelope.parameters))


def _named(given: object) -> dict[str, Any]:
    """The parameters of a message by name; InvalidField where they are no such map."""
    accepted = f"a map of at most {MAX_PARAMETERS} names, each of at most {NAME_CHARACTERS} characters"
    if not isinstance(given, dict) or len(given) > MAX_PARAMETERS:
        received = f"{len(given)} names" if isinstance(given, dict) else type(given).__name__
        raise InvalidField(
            "The parameters are not such a map.", field="parameters", received=received, accepted=accepted
        )
    strange = [name for name in given if not isinstance(name, str) or len(name) > NAME_CHARACTERS]
    if strange:
        raise InvalidField(
            "A parameter has no such name.", field="parameters", received=strange[0], accepted=accepted
        )
    return given


def _check_places(envelope: GenerateEnvelope) -> None:
    """Refuse what has a meaning elsewhere in a message, and would be ignored where it stands.

    Names that no version knows are ignored, as in every message: see :class:`giornata.wire.values.WireModel`.
    """
    for name in envelope.model_extra or ():
        if name in KEY_NAMES:
            accepted = f"the key as the header {IDEMPOTENCY_HEADER}"
        elif name in EditParameters.model_fields:
            accepted = f"{name} within parameters, where the message takes it"
        elif name in EditMessage.model_fields:
            accepted = f"no {name}: pictures from text are made of none"
        else:
            continue
        raise InvalidField(
            "A field stands where it is not read.", field=name, received=name, accepted=accepted
        )


def check_reply(reply: str, tenant: Tenant) -> None:
    """Check that the answer goes to the application that asks; an empty `reply` asks for none.

    The InvalidField goes to that `reply`, and so repeats nothing of the request.
    """
    if reply and not _is_below(tenant.inbox, reply):
        raise InvalidField(
            "The answer goes to the inbox of the application to which the API key belongs, and nowhere else.",
            field="reply",
            accepted=f"a subject below {tenant.inbox}. (the client's inbox prefix)",
        )


def _is_below(inbox: str, subject: str) -> bool:
    """Return whether `subject` lies in the inbox, and is no pattern."""
    return subject.startswith(inbox) and _TOKENS.match(subject, len(inbox)) is not None


def check_envelope(envelope: GenerateEnvelope, tenant: Tenant, limit_bytes: int) -> None:
    """Check what `tenant` sends beside parameters, pictures of at most `limit_bytes` each among it.

    InvalidField or PayloadTooLarge names the field at fault.
    """
    if envelope.progress is not None and not _is_below(tenant.inbox, envelope.progress):
        raise InvalidField(
            "Progress goes to the caller's own inbox only.",
            field="progress",
            received=envelope.progress,
            accepted=f"a subject below {tenant.inbox}., without wildcards",
        )
    check_time(envelope.remaining_ms)
    check_count(len(envelope.reference))
    check_pictures(envelope.brought, tenant, limit_bytes)
    if isinstance(envelope, EditEnvelope):
        check_source(envelope.image, envelope.template_id)


def check_time(remaining_ms: int) -> None:
    """Raise InvalidField where a message allows no time for its answer."""
    if remaining_ms <= 0:
        raise InvalidField(
            "No time is left.", field="remaining_ms", received=remaining_ms, accepted="above 0"
        )


def check_pictures(brought: Brought, tenant: Tenant, limit_bytes: int) -> None:
    """Check the pictures of a message; raises as :func:`check_envelope`."""
    inline = inline_bytes(brought)
    if inline > INLINE_BYTES:
        raise PayloadTooLarge(
            "The pictures are too large to travel inside the message.",
            field=brought[0][0],
            received=f"{inline} bytes",
            accepted=f"{INLINE_BYTES} bytes together, or claim checks",
        )
    for field, picture in brought:
        if isinstance(picture, bytes):
            check_filled(picture, field)
        elif not picture.key.startswith(f"{tenant.name}/"):
            raise InvalidField(
                "The claim check is not of this tenant.",
                field=field,
                received=picture.key,
                accepted=f"a key below {tenant.name}/",
            )
        elif picture.size_bytes > limit_bytes:
            raise PayloadTooLarge(
                field=field, received=f"{picture.size_bytes} bytes", accepted=f"at most {limit_bytes} bytes"
            )


def inline_bytes(brought: Brought) -> int:
    """Bytes of pictures inside the message."""
    return sum(len(picture) for _, picture in brought if isinstance(picture, bytes))


def inline_pictures(sizes: Mapping[int, int], room_bytes: int) -> set[int]:
    """Indices of the pictures that travel inside a reply of at most `room_bytes`; the others become claim checks.

    `sizes` are bytes by index; the pictures are taken in order.
    """
    left = room_bytes - REPLY_MARGIN_BYTES
    chosen: set[int] = set()
    for index, size in sorted(sizes.items()):
        if size <= left:
            chosen.add(index)
            left -= size
    return chosen


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

    async def edit(self, envelope: GenerateEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit or a generation. Its events go to the subject `progress`, from *queued* on."""
        return await self._carried_out(envelope, self._asker(envelope.api_key, reply), headers)

    async def probe(self, envelope: ProbeEnvelope, headers: Mapping[str, str], reply: str) -> EditReply:
        """Carry out an edit for the profiler, as the tenant that it names; the server lets nobody else ask."""
        tenant = Tenant(envelope.tenant, inbox=inbox(NatsRole.PROFILER))
        check_reply(reply, tenant)
        return await self._carried_out(envelope, tenant, headers)

    async def _carried_out(
        self, envelope: GenerateEnvelope, tenant: Tenant, headers: Mapping[str, str]
    ) -> EditReply:
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
            grow(MESSAGE_COPIES * inline_bytes(envelope.brought))
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
        check_pictures(envelope.brought, tenant, gateway.config.max_file_bytes)
        deadline = Deadline.after_ms(envelope.remaining_ms).at_most(gateway.config.budget_s)
        with gateway.uploads.growing(tenant) as grow:
            grow(MESSAGE_COPIES * inline_bytes(envelope.brought))
            async with gateway.shown(tenant, asked, envelope.image, deadline) as shown:
                pictures = shown.pictures
                sizes = {index: ref.size_bytes for index, ref in enumerate(pictures)}
                inline = [pictures[index] for index in inline_pictures(sizes, self.limit_bytes)]
                room_bytes = MESSAGE_COPIES * sum(ref.size_bytes for ref in inline)
                async with gateway.answers.room(tenant, room_bytes):
                    pngs = {ref.key: await gateway.blobs.get(ref) for ref in inline}
                shown.handed.update(ref.key for ref in pictures if ref.key not in pngs)
                return mask_made(shown.reply, pngs)

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
