"""The outcome of an attempt's rows, written to the blob store and then, in one revision, to the job record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import nats.errors
import structlog

from giornata import retries, tensors
from giornata.blobs import BlobStore
from giornata.records import JobRecordStore
from giornata.wire.errors import GiornataError, Overloaded, RowPoisoned
from giornata.wire.jobs import BlobRef, Job, JobRecord, RowRecord, RowState, TemplateUse
from giornata.wire.messages import RunRequest
from giornata.wire.requests import Reuse
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)


class WrittenAttemptResult(NamedTuple):
    """The record that is kept of an attempt."""

    record: JobRecord
    """The record after the write; it shows whether the attempt still counted."""
    superseded: tuple[BlobRef, ...]
    """Latents that the record does not hold: a state that the row has gone on from, or an attempt's that was void."""


class AttemptResultWriter:
    """The edge to blob store and job records."""

    def __init__(self, blobs: BlobStore, records: JobRecordStore, worker: str) -> None:
        self._blobs, self._records, self._worker = blobs, records, worker

    async def write(self, attempt: Attempt) -> WrittenAttemptResult:
        """Write latents of finished rows, errors of failed ones, and where the others can go on.

        Until the caller's time is over it tries again while NATS or the blob store does not answer.
        """
        stored = [row.resume.latents for row in attempt.request.rows if row.resume]
        changes: dict[int, Mapping[str, Any]] = {
            index: {"error": error.body()} for index, error in attempt.errors.items()
        }
        for index, row in attempt.rows.items():
            if index in changes or row.step == 0:
                continue
            change, left = await self._outcome(attempt.request.job, row)
            stored += left
            changes[index] = change
        record = await self._change(attempt.request, changes)
        held = {ref.key for row in record.rows for ref in _latents(row)}
        return WrittenAttemptResult(record, tuple(ref for ref in stored if ref.key not in held))

    async def _outcome(self, job: Job, row: Row) -> tuple[Mapping[str, Any], list[BlobRef]]:
        """Return what the record is to say of a row that has no error, and the latents that are written for that."""
        try:
            latents = await self._put(job, row)
        except RowPoisoned as error:  # handed back before its last step was judged
            return {"error": error.body()}, []
        if not row.done:
            return {"resume": _state(row, latents)}, [latents]
        ended = {
            "latents": latents,
            "resume": None,
            "computed_tokens": row.computed_tokens,
            "template": template_use(job, row),
            "loras_from": row.adapters.loras_from if row.adapters.loras else None,
        }
        return ended, [latents]

    async def forget(self, latents: Sequence[BlobRef]) -> None:
        """Delete latents that no record holds any more. A failure is logged: they expire."""
        try:
            await self._blobs.delete(*latents)
        except GiornataError as error:
            log.warning("latents_not_forgotten", keys=[ref.key for ref in latents], error=str(error))

    @retries.patiently(Overloaded).wraps
    async def _put(self, job: Job, row: Row) -> BlobRef:
        """Keep a row's latents under a key that no other attempt has: for prepost now, or for any denoiser later."""
        data = await asyncio.to_thread(lambda: tensors.pack(row.export().tensors))
        key = f"{job.folder}latents-{row.key.index}-{secrets.token_hex(4)}"
        return await self._blobs.put(key, data, job.intermediate_ttl_s)

    @retries.patiently(nats.errors.Error).wraps
    async def _change(self, request: RunRequest, changes: Mapping[int, Mapping[str, Any]]) -> JobRecord:
        def freed(record: JobRecord) -> JobRecord | None:
            return record.freed(request.attempt, self._worker, lambda row: changes.get(row.index, {}))

        return await self._records.change(request.job.job_id, freed)


def _latents(row: RowRecord) -> Iterator[BlobRef]:
    if row.latents is not None:
        yield row.latents
    if row.resume is not None:
        yield row.resume.latents


def _state(row: Row, latents: BlobRef) -> RowState:
    return RowState(step=row.step, latents=latents, loras_from=row.adapters.loras_from)


def template_use(job: Job, row: Row) -> TemplateUse:
    """Return what a template did for a row."""
    if job.parameters.reuse is Reuse.OFF:
        return TemplateUse.OFF
    if row.template is not None:
        return TemplateUse.HIT
    return TemplateUse.SKIPPED if row.skipped else TemplateUse.MISS
