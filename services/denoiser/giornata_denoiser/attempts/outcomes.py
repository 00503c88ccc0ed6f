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
from giornata.wire.messages import RunRequest
from giornata.wire.requests import Reuse
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.rows.row import Row


class Outcomes:
    """The edge to blob store and job records."""

    def __init__(self, blobs: BlobStore, records: Records, worker: str) -> None:
        self._blobs, self._records, self._worker = blobs, records, worker

    async def write(self, attempt: Attempt) -> JobRecord:
        """Write latents of finished rows, errors of failed ones, and where the others can go on.

        Until the caller's time is over it tries again while NATS or the blob store does not answer.

        Returns:
            The record as it stands; the caller sees in it whether this attempt still counted.
        """
        job = attempt.request.job
        changes: dict[int, Mapping[str, Any]] = {
            index: {"error": error.body()} for index, error in attempt.errors.items()
        }
        for index, row in attempt.rows.items():
            if index in changes or row.step == 0:
                continue
            latents = await self._put(job, row)
            if row.done:
                changes[index] = {
                    "latents": latents,
                    "resume": None,
                    "computed_tokens": row.computed_tokens,
                    "template": template_use(job, row),
                }
            else:
                changes[index] = {"resume": RowState(step=row.step, latents=latents)}
        return await self._change(attempt.request, changes)

    @retries.patiently(Overloaded).wraps
    async def _put(self, job: Job, row: Row) -> BlobRef:
        """Keep a row's latents under a key that no other attempt has."""
        data = await asyncio.to_thread(lambda: tensors.pack(row.export().tensors))
        key = f"{job.job_id}/latents-{row.key.index}-{secrets.token_hex(4)}"
        return await self._blobs.put(key, data, job.intermediate_ttl_s)

    @retries.patiently(nats.errors.Error).wraps
    async def _change(self, request: RunRequest, changes: Mapping[int, Mapping[str, Any]]) -> JobRecord:
        def freed(record: JobRecord) -> JobRecord | None:
            return record.freed(request.attempt, self._worker, lambda row: changes.get(row.index, {}))

        return await self._records.change(request.job.job_id, freed)


def template_use(job: Job, row: Row) -> TemplateUse:
    """What a template did for a row."""
    if job.parameters.reuse is Reuse.OFF:
        return TemplateUse.OFF
    if row.template is not None:
        return TemplateUse.HIT
    return TemplateUse.SKIPPED if row.skipped else TemplateUse.MISS
