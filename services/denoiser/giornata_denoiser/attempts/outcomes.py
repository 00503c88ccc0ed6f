"""What became of an attempt's rows, written to the blob store and then, in one revision, to the job record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import nats.errors

from giornata import retries, tensors
from giornata.blobs import BlobStore
from giornata.records import Records
from giornata.wire.errors import Overloaded
from giornata.wire.jobs import BlobRef, Job, JobRecord, RowState, TemplateUse
from giornata.wire.requests import Reuse
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.rows.row import Row

RowChange = Mapping[str, Any]
"""Fields that change in a row of a record."""


class Outcomes:
    """The edge to blob store and job records."""

    def __init__(self, blobs: BlobStore, records: Records, worker: str) -> None:
        self._blobs = blobs
        self._records = records
        self._worker = worker

    async def write(self, attempt: Attempt) -> JobRecord:
        """Write latents of finished rows, errors of failed ones, and where the others can go on.

        Until the caller's time is over it tries again while NATS or the blob store does not answer.

        Returns:
            The record as it stands; the caller sees in it whether this attempt still counted.
        """
        changes = await self._changes(attempt)
        return await self._change(attempt.request.job.job_id, attempt.request.attempt, changes)

    async def _changes(self, attempt: Attempt) -> dict[int, RowChange]:
        job = attempt.request.job
        changes: dict[int, RowChange] = {
            index: {"error": error.body()} for index, error in attempt.errors.items()
        }
        for index, row in attempt.rows.items():
            if index in changes or row.step == 0:
                continue
            latents = await self._put(job, row)
            state = RowState(step=row.step, latents=latents)
            done = {
                "latents": latents,
                "resume": None,
                "computed_tokens": row.computed_tokens,
                "template": template_use(job, row),
            }
            changes[index] = done if row.done else {"resume": state}
        return changes

    @retries.patiently(Overloaded).wraps
    async def _put(self, job: Job, row: Row) -> BlobRef:
        """Keep a row's latents under a key that no other attempt has."""
        data = await asyncio.to_thread(lambda: tensors.pack(row.export().tensors))
        key = f"{job.job_id}/latents-{row.key.index}-{secrets.token_hex(4)}"
        return await self._blobs.put(key, data, job.intermediate_ttl_s)

    @retries.patiently(nats.errors.Error).wraps
    async def _change(self, job_id: str, attempt: int, changes: Mapping[int, RowChange]) -> JobRecord:
        return await self._records.change(
            job_id, lambda record: settled(record, attempt, self._worker, changes)
        )


def template_use(job: Job, row: Row) -> TemplateUse:
    """What a template did for a row."""
    if job.parameters.reuse is Reuse.OFF:
        return TemplateUse.OFF
    if row.template is not None:
        return TemplateUse.HIT
    return TemplateUse.SKIPPED if row.skipped else TemplateUse.MISS


def settled(
    record: JobRecord, attempt: int, worker: str, changes: Mapping[int, RowChange]
) -> JobRecord | None:
    """The record with an attempt's outcome; None if the rows have been given to another since."""
    return record.freed(attempt, worker, lambda row: changes.get(row.index, {}))
