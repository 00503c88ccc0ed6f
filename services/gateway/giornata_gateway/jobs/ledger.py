"""What the records and the router tell of jobs, and how a job is cancelled."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import Records
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, JobNotFound
from giornata.wire.jobs import JobRecord
from giornata.wire.messages import CancelRows, Forecast, ForecastRequest

log = structlog.get_logger(__name__)

FORECAST_MS = 500
"""How long an answer waits for the router's forecast."""


@dataclass(frozen=True)
class JobLedger:
    """The jobs of all gateways."""

    bus: Bus
    records: Records

    async def read_of(self, tenant: str, job_id: str) -> JobRecord:
        """The record of a tenant's job.

        Raises:
            JobNotFound: there is none, or it belongs to another tenant, which the answer does not tell.
        """
        try:
            subjects.token(job_id)
        except ValueError as error:
            raise JobNotFound(received=job_id) from error
        record = await self.records.get(job_id)
        if record.job.tenant != tenant:
            raise JobNotFound(received=job_id)
        return record

    async def forecast(self, job_id: str) -> Forecast | None:
        """When a job should have its pictures; None where the router does not know or does not answer."""
        deadline = Deadline.after_ms(FORECAST_MS)
        request = ForecastRequest(job_id=job_id, remaining_ms=deadline.remaining_ms())
        try:
            return await self.bus.call(subjects.FORECAST, request, Forecast, deadline)
        except GiornataError as error:
            log.debug("no_forecast", job_id=job_id, error=str(error))
            return None

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a job's end, in the record and by broadcast. A terminal job stays as it is.

        Raises:
            JobNotFound: there is none.
        """
        record = await self.records.change(job_id, lambda record: record.model_copy(update={"cancel": True}))
        if not record.state.terminal:
            await self.bus.publish(subjects.cancel(job_id), CancelRows(job_id=job_id, attempt=0))
            log.info("cancel_requested", job_id=job_id)
        return record
