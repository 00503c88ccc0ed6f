"""Telling of steps and pictures, in order, beside the engine's work."""

from __future__ import annotations

import asyncio

import nats.errors
import structlog
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.events import EventKind
from giornata.wire.jobs import Job
from giornata.wire.messages import RunRequest
from giornata_denoiser.attempts.previews import preview_event
from giornata_denoiser.engine.protocol import RowPreview

log = structlog.get_logger(__name__)


class EventPublisher:
    """Publishes the events of a denoiser's jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._previews: asyncio.Queue[tuple[RunRequest, RowPreview]] = asyncio.Queue()

    def show(self, request: RunRequest, preview: RowPreview) -> None:
        """Have :meth:`shown` tell it when those before it are told."""
        self._previews.put_nowait((request, preview))

    async def shown(self) -> None:
        """Encode and tell previews, one at a time and in order; until it is cancelled."""
        while True:
            request, preview = await self._previews.get()
            try:
                event = await asyncio.to_thread(preview_event, request, preview)
                await self.publish(request.job, EventKind.PREVIEW, event)
            except Exception:  # the preview's edge: logged; the picture itself goes on
                log.exception("preview_lost", job=request.job.job_id, step=preview.step)

    async def publish(self, job: Job, kind: EventKind, event: BaseModel) -> None:
        """Events may be lost while NATS is away; the record is the truth."""
        try:
            await self._bus.publish(subjects.event(job.gateway, job.job_id, kind), event)
        except nats.errors.Error as error:
            log.warning("event_lost", job=job.job_id, kind=kind, error=repr(error))
