"""The NATS door: ``giornata.edit`` and ``giornata.edit.cancel``, the same path as HTTP behind other envelopes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager

from giornata.bus.bus import Endpoint
from giornata.wire import codec, subjects
from giornata.wire.errors import GiornataError, InternalError, InvalidField
from giornata.wire.events import EVENT_TYPES, StateEvent
from giornata.wire.jobs import BlobRef, JobRecord, JobState
from giornata.wire.messages import (
    EVENT_HEADER,
    IDEMPOTENCY_HEADER,
    Accepted,
    CancelMessage,
    EditReply,
    Forecast,
    Picture,
)
from giornata_gateway.gateway import Gateway
from giornata_gateway.intake.rules.envelopes import (
    EditEnvelope,
    check_envelope,
    inline_bytes,
    inline_pictures,
    read_parameters,
)
from giornata_gateway.intake.rules.idempotency import read_key
from giornata_gateway.intake.rules.tenants import Tenant
from giornata_gateway.jobs.feed import News, open_feed, until_done
from giornata_gateway.jobs.preparation import Order
from giornata_gateway.jobs.sharing import identified
from giornata_gateway.jobs.submission import Held
from giornata_gateway.views.answers import error_of
from giornata_gateway.views.jobs import finish_s_of, position_of

REPLY_BYTES = 8 << 20
"""No reply is larger, even where the server would carry it."""
MESSAGE_COPIES = 2
"""Of pictures inside a message: as it came and as it was read, both kept until it is answered."""

KINDS = {kind_type: kind for kind, kind_type in EVENT_TYPES.items()}


@asynccontextmanager
async def open_door(gateway: Gateway) -> AsyncIterator[None]:
    """Answer edits over NATS while inside; on leaving, finish those that were delivered."""
    door = NatsDoor(gateway)
    limit = door.reply_limit()
    edit = Endpoint(subjects.EDIT, EditEnvelope, door.edit, limit_bytes=limit, headers=True)
    cancel = Endpoint(subjects.EDIT_CANCEL, CancelMessage, door.cancel)
    async with gateway.bus.serve("gateway", edit, cancel, instance=gateway.config.instance):
        yield


class NatsDoor:
    """Handlers of the two endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def reply_limit(self) -> int:
        """Bytes that a reply may have on this server."""
        return min(REPLY_BYTES, self._gateway.bus.client.max_payload)

    async def edit(self, envelope: EditEnvelope, headers: Mapping[str, str]) -> EditReply:
        """Carry out an edit. A caller that sets `progress` is told its events there, from *queued* on."""
        gateway = self._gateway
        with _counted(gateway, subjects.EDIT):
            tenant = gateway.tenant(envelope.api_key)
            given = [headers[IDEMPOTENCY_HEADER]] if IDEMPOTENCY_HEADER in headers else []
            key = read_key(given, IDEMPOTENCY_HEADER)
            order = await identified(self._order(envelope, tenant), key)
            known = await gateway.sharing.known(order)
            if known is None:  # what a job of before was made of need not be there any more
                await self._check_blobs(order.image, order.mask)
            with ExitStack() as holds:
                grow = holds.enter_context(gateway.uploads.growing())
                place = holds.enter_context(
                    gateway.waiter()
                    if known
                    else gateway.place(tenant, order.parameters.n, order.job_id, order.longest_s)
                )
                grow(MESSAGE_COPIES * inline_bytes(envelope))
                prepared = known or await gateway.prepare(order)
                async with gateway.held(prepared, place) as held:
                    if place.repeated:
                        gateway.metrics.repeated("nats")
                    if envelope.progress is not None:
                        await self._relay(held, envelope.progress)
                    record = await gateway.submission.outcome(held)
                place.carried_out()
            return await self._reply(record)

    def _order(self, envelope: EditEnvelope, tenant: Tenant) -> Order:
        """The order in an envelope."""
        config = self._gateway.config
        parameters = read_parameters(envelope)
        image, mask = check_envelope(envelope, tenant.name, config.max_file_bytes)
        return Order(
            parameters,
            image,
            mask,
            tenant.name,
            envelope.priority,
            self._gateway.deadline(envelope.remaining_ms / 1000).at_most(config.job_budget_s),
            template_id=envelope.template_id,
            weight=tenant.weight,
        )

    async def cancel(self, message: CancelMessage) -> Accepted:
        """Cancel a job of the caller's tenant; one that has ended stays as it is."""
        with _counted(self._gateway, subjects.EDIT_CANCEL):
            tenant = self._gateway.tenant(message.api_key)
            record = await self._gateway.submission.record(message.job_id, tenant.name)
            await self._gateway.submission.cancel(record.job.job_id)
            return Accepted(job_id=record.job.job_id)

    async def _check_blobs(self, *pictures: bytes | BlobRef | None) -> None:
        for name, picture in zip(("image", "mask"), pictures, strict=True):
            if isinstance(picture, BlobRef) and not await self._gateway.blobs.has(picture):
                raise InvalidField(
                    "There is no such blob.", field=name, received=picture.key, accepted="a stored blob"
                )

    async def _relay(self, held: Held, subject: str) -> None:
        """Publish the job's events to `subject` until its last one; *queued* comes first and tells the job's id."""
        queued = StateEvent(job_id=held.job.job_id, state=JobState.QUEUED, attempt=0)
        gateway = self._gateway
        forecast = await gateway.submission.forecast_of(held.job.job_id)
        await self._publish(subject, _with_forecast(queued, forecast))
        async with open_feed(gateway.bus, held.job.job_id, 0, gateway.restore) as told:
            async for item in until_done(told, held.ended, gateway.config.heartbeat_s, held.deadline):
                if item is not None and item.event != queued:
                    await self._publish(subject, item.event)

    async def _publish(self, subject: str, event: News) -> None:
        await self._gateway.bus.client.publish(
            subject, codec.encode(event), headers={EVENT_HEADER: KINDS[type(event)]}
        )

    async def _reply(self, record: JobRecord) -> EditReply:
        error = error_of(record)
        if error is not None:
            raise error
        inspection = record.inspection
        if inspection is None:
            raise InternalError("A completed job has no inspection.", received=record.job.job_id)
        refs = {row.index: row.image for row in record.images if row.image is not None}
        sizes = {index: ref.size_bytes for index, ref in refs.items()}
        inline = inline_pictures(sizes, self.reply_limit())
        room_bytes = MESSAGE_COPIES * sum(sizes[index] for index in inline)
        async with self._gateway.answers.room(room_bytes):
            pictures = [
                Picture(index=row.index, seed=row.seed, data=await self._gateway.picture(refs[row.index]))
                if row.index in inline
                else Picture(index=row.index, seed=row.seed, ref=refs[row.index])
                for row in record.images
            ]
        return EditReply(
            job_id=record.job.job_id,
            width=inspection.output_width,
            height=inspection.output_height,
            output_format=record.job.parameters.output_format,
            pictures=tuple(pictures),
            errors=tuple(f"Picture {row.index}: {row.error.message}" for row in record.rows if row.error),
        )


def _with_forecast(event: StateEvent, forecast: Forecast | None) -> StateEvent:
    """`event` with what the status of a job tells at the HTTP door."""
    return event.model_copy(
        update={"queue_position": position_of(forecast), "predicted_finish_s": finish_s_of(forecast)}
    )


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
