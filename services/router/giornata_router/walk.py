"""One job's way from the queue to its terminal state. Every step can be taken again by another router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

import nats.errors
import structlog

from giornata.records import RecordRevision
from giornata.scheduling.demand import JobDemand
from giornata.wire.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    GiornataError,
    IntermediateLost,
    InternalError,
    JobCancelled,
)
from giornata.wire.jobs import BlobRef, Encoding, Inspection, JobState
from giornata.wire.progress import Assignment, JobRecord, RowRecord
from giornata.wire.values import Intermediate
from giornata_router.computing import DenoiseStage
from giornata_router.lease import LeaseEndedError
from giornata_router.live_record import JobEndedError, LiveJobRecord
from giornata_router.rules import leftovers, transitions
from giornata_router.tools import RouterContext

MOST_PAUSE_S: Final = 30.0
"""Longest pause before a result is made again that was lost again and again."""

log = structlog.get_logger(__name__)


class JobRunner:
    """Carries one job: make it with its record as last known, then await :meth:`to_the_end` once."""

    def __init__(self, tools: RouterContext, known: RecordRevision[JobRecord], waited_ms: float) -> None:
        self._tools, self._job = tools, known.record.job
        self._live = LiveJobRecord(tools.bus, tools.records, known, waited_ms)
        self._sheet, self._deadline = self._live.sheet, self._live.deadline
        self._scope: asyncio.Timeout | None = None
        self._cancelled = False
        self._made: list[BlobRef] = []
        """What stages made for this walk."""
        self._pictures: dict[int, BlobRef] = {}
        """Finished ones, by row."""

    def cancel(self) -> None:
        """The job is cancelled: stop at the next await."""
        self._cancelled = True
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def unwritten(self, now: float) -> bool:
        """Whether the job's state should be written down: the stage lasts."""
        return self._live.unwritten(now)

    async def write_state(self) -> None:
        """Write the job's state down while a stage goes on."""
        try:
            await self._live.write_state()
        except (GiornataError, nats.errors.Error, LeaseEndedError) as error:  # a later change writes it
            log.warning("state_not_written", job=self._job.job_id, error=repr(error))

    async def to_the_end(self) -> JobRecord:
        """Walk until the record is terminal, the `done` event is published, and what has no more use is deleted.

        A router that dies before the deletion leaves the job in the queue: the next one deletes what the terminal
        record still names, and the rest ends with its time.

        Raises:
            nats.errors.Error: NATS does not answer; the walk can be begun again with the record as it stands.
            LeaseEndedError: it can be begun again by the router that leads.
        """
        if not self._live.record.state.terminal:
            over = self._cancelled or not self._deadline.remaining_s()
            error = self._out_of_time() if over else await self._try()
            if error is not None:
                await self._close(error)
        await self._live.tell_end()
        await self._clear()
        return self._live.record

    def _spent(self, record: JobRecord) -> JobRecord:
        """Note what the record names, since the terminal one does not name it any more."""
        self._made += leftovers.of_record(record)
        return record

    async def _clear(self) -> None:
        """Delete the job's own blobs that have no more use. What cannot be deleted ends with its time."""
        refs = leftovers.leftovers(self._live.record, self._made)
        try:
            await self._tools.blobs.delete(*refs)
        except GiornataError as error:
            log.warning("leftovers_stay", job=self._job.job_id, blobs=len(refs), error=str(error))

    async def _try(self) -> GiornataError | None:
        """The walk itself; the error that ends the job, if any."""
        scope = asyncio.timeout(self._deadline.remaining_s())
        try:
            async with scope:
                self._scope = scope
                with self._tools.prepost.carrying(self._job):
                    await self._walk()
        except nats.errors.Error:
            if scope.expired():
                return self._out_of_time()
            raise
        except TimeoutError:
            return self._out_of_time()
        except JobEndedError:
            return None
        except GiornataError as error:
            return error
        except LeaseEndedError:
            raise
        except Exception:  # the walk's edge: a failing job fails alone, is logged and answered
            log.exception("walk_failed", job=self._job.job_id)
            return InternalError()
        finally:
            self._scope = None
        return None

    def _out_of_time(self) -> GiornataError:
        if self._cancelled:
            return JobCancelled()
        message = f"The time allowed for this edit ended while {self._live.doing}."
        return DeadlineExceeded(message, accepted=f"{self._job.budget_ms} ms")

    async def _walk(self) -> None:
        live = self._live
        live.check()
        if live.record.state is JobState.QUEUED:
            await live.enter(JobState.PREPARING)
        rows = await self._stages()
        while lost := transitions.lost_intermediates(rows):
            await self._make_again(lost)
            rows = await self._stages()
        await live.end(lambda record: transitions.ended(self._spent(record), rows, self._sheet.times()))

    async def _stages(self) -> tuple[RowRecord, ...]:
        """Every stage that the record lacks; the rows with pictures or errors, or as soon as some lost something."""
        live = self._live
        inspection = live.record.inspection or await self._inspect()
        if live.record.pending_rows:
            inspection = await self._denoise(inspection)
            if transitions.lost_intermediates(live.record.rows):
                return live.record.rows
        await live.enter(JobState.FINISHING)
        return await self._finish(inspection)

    async def _make_again(self, lost: Mapping[int, Intermediate], *, inspected: bool = False) -> None:
        """Send rows back; inspect the pictures again where that made what was lost, or as `inspected` says."""
        remade = self._live.record.remade
        log.warning("intermediate_lost", job=self._job.job_id, rows=lost, inspected=inspected, remade=remade)
        if remade:  # a store that loses everything is not worked for at full speed
            await asyncio.sleep(min(MOST_PAUSE_S, 0.1 * 2.0 ** min(remade, 10)))
        inspected = inspected or Intermediate.ALPHA in lost.values()
        inspection = await self._inspect() if inspected else None
        await self._live.change(lambda r: transitions.made_again(r, lost, inspection, self._sheet.times()))

    async def _inspect(self) -> Inspection:
        self._live.doing = "inspecting its pictures"
        with self._sheet.timing("prepare"):
            inspection = await self._tools.prepost.inspect(self._job, self._deadline)
        self._made += leftovers.of_inspection(inspection)
        self._sheet.compute("inspect", inspection.compute_ms)
        return inspection

    async def _encode(self, inspection: Inspection) -> Encoding:
        self._live.doing = "encoding"
        with self._sheet.timing("prepare"):
            encoding = await self._tools.prepost.encode(self._job, inspection, self._deadline)
        self._made += leftovers.of_encoding(encoding)
        self._sheet.compute("encode", encoding.compute_ms)
        return encoding

    async def _denoise(self, inspection: Inspection) -> Inspection:
        """Have the pending rows computed; the inspection, which is another one if its picture had been lost."""
        record = self._live.record
        demand = transitions.demand(record, inspection, record.pending_rows, None)
        self._tools.forecasting.learn(demand)
        encoding, likely = record.encoding, None
        if encoding is None:
            likely = await self._prefetch(inspection, demand)
        while encoding is None:
            try:
                encoding = await self._encode(inspection)
            except IntermediateLost:
                await self._make_again({}, inspected=True)
                inspection = self._live.record.inspection or inspection
        self._tools.forecasting.prepared(self._job.job_id)
        await DenoiseStage(self._tools, self._live, inspection, encoding, likely).run()
        return inspection

    async def _prefetch(self, inspection: Inspection, demand: JobDemand) -> str | None:
        """Tell the worker that probably gets a row to load its template and LoRAs while the rows are encoded."""
        if demand.template is None and not demand.adapters:
            return None
        worker = self._tools.dispatch.likely(demand)
        if worker is not None:
            await self._tools.workers.prefetch(worker, self._job, inspection)
            self._tools.dispatch.fetching(worker, demand)
        return worker

    async def _finish(self, inspection: Inspection) -> tuple[RowRecord, ...]:
        self._live.doing = "finishing"
        with self._tools.forecasting.finishing(self._job, time.monotonic()), self._sheet.timing("finish"):
            return await self._finish_all(self._live.record.rows, inspection)

    async def _finish_all(self, rows: tuple[RowRecord, ...], inspection: Inspection) -> tuple[RowRecord, ...]:
        if self._job.regions:
            return await self._finish_regions(rows, inspection)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finish_row(row, inspection)) for row in rows]
        return tuple(task.result() for task in tasks)

    async def _finish_row(self, row: RowRecord, inspection: Inspection) -> RowRecord:
        """The row with its picture or its error; a row that fails does not hold back the others."""
        if row.latents is None:
            return row
        try:
            return row.model_copy(
                update={"image": await self._finished(row.index, (row.latents,), inspection)}
            )
        except GiornataError as error:
            return row.model_copy(update={"error": error.body()})

    async def _finish_regions(
        self, rows: tuple[RowRecord, ...], inspection: Inspection
    ) -> tuple[RowRecord, ...]:
        """The rows of one picture's regions: the first one with the picture, unless a region has failed."""
        latents = tuple(row.latents for row in rows if row.latents is not None)
        if len(latents) < len(rows):
            return rows
        try:
            image = await self._finished(0, latents, inspection)
        except GiornataError as error:
            return tuple(row.model_copy(update={"error": error.body()}) for row in rows)
        return rows[0].model_copy(update={"image": image}), *rows[1:]

    async def _finished(self, index: int, latents: tuple[BlobRef, ...], inspection: Inspection) -> BlobRef:
        """The finished picture of a row, or of rows that are its regions; made once."""
        if index not in self._pictures:
            reply = await self._tools.prepost.finish(self._job, inspection, index, latents, self._deadline)
            self._sheet.compute("decode", reply.decode_ms)
            self._sheet.compute("paste", reply.paste_ms)
            self._made.append(reply.image)
            self._pictures[index] = reply.image
        return self._pictures[index]

    async def _close(self, error: GiornataError) -> None:
        """Write the terminal state of a job that was cancelled or failed, and free its workers."""
        if isinstance(error, AttemptsExhausted):
            await self._quarantine(error)
        held: tuple[Assignment, ...] = ()

        def closed(record: JobRecord) -> JobRecord:
            nonlocal held
            held = record.assignments
            return transitions.closed(self._spent(record), error, self._sheet.times())

        await self._live.end(closed)
        for assignment in held:
            await self._tools.workers.drop(self._job.job_id, assignment)

    async def _quarantine(self, error: AttemptsExhausted) -> None:
        """Keep the job for an operator, before its terminal record: a router that finds that one does no more."""
        record = await self._tools.records.get(self._job.job_id)
        if not record.state.terminal:
            log.error("job_quarantined", job=self._job.job_id, causes=record.causes)
            await self._tools.quarantine.put(transitions.closed(record, error, self._sheet.times()))
