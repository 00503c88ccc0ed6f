"""Telling of steps and pictures, in order, beside the engine's work."""

from __future__ import annotations

import asyncio

import nats.errors
import structlog
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.cells import in_cell
from giornata.wire.events import EventKind
from giornata.wire.jobs import Job
from giornata.wire.messages import RunRequest
from giornata_denoiser.attempts.previews import preview_event
from giornata_denoiser.engine.protocol import RowPreview

log = structlog.get_logger(__name__)


class Telling:
    """Publishes the events of a denoiser's jobs in a `cell`."""

    def __init__(self, bus: Bus, cell: str) -> None:
        self._bus, self._cell = bus, cell
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
        subject = subjects.event(job.gateway, job.job_id, kind)
        if kind is EventKind.DENOISED:  # the router's news, and no gateway's
            subject = in_cell(subject, self._cell)
        try:
            await self._bus.publish(subject, event)
        except nats.errors.Error as error:
            log.warning("event_lost", job=job.job_id, kind=kind, error=repr(error))
