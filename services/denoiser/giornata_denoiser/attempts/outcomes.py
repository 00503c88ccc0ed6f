"""What became of an attempt's rows, written to the blob store and then, in one revision, to the job record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import nats.errors
import structlog

from giornata import retries, tensors
from giornata.blobs import BlobStore
from giornata.records import Records
from giornata.wire.approximate import KEPT_S, KeptLatent
from giornata.wire.errors import GiornataError, Overloaded, RowPoisoned
from giornata.wire.jobs import BlobRef, Job
from giornata.wire.messages import RunRequest
from giornata.wire.progress import JobRecord, RowRecord, RowState, TemplateUse
from giornata.wire.requests import Reuse
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.attempts.beginning import kept_region, new_key, packed
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)


class Written(NamedTuple):
    """What is written down of an attempt."""

    record: JobRecord
    """The record after the write; it shows whether the attempt still counted."""
    superseded: tuple[BlobRef, ...]
    """Latents that the record does not hold: a state that the row has gone on from, or an attempt's that was void."""


class Outcomes:
    """The edge to blob store and job records."""

    def __init__(self, blobs: BlobStore, records: Records, worker: str) -> None:
        self._blobs, self._records, self._worker = blobs, records, worker

    async def write(self, attempt: Attempt) -> Written:
        """Write latents of finished rows, errors of failed ones, and where the others can go on.

        Until the caller's time is over it tries again while NATS or the blob store does not answer.
        """
        job = attempt.request.job
        stored = [row.resume.latents for row in attempt.request.rows if row.resume is not None]
        changes: dict[int, Mapping[str, Any]] = {
            index: {"error": error.body()} for index, error in attempt.errors.items()
        }
        for index, row in attempt.rows.items():
            if index in changes or row.step == 0:
                continue
            try:
                latents = await self._put(job, row)
            except RowPoisoned as error:  # handed back before its last step was judged
                changes[index] = {"error": error.body()}
                continue
            stored.append(latents)
            if row.done:
                changes[index] = {
                    "latents": latents,
                    "resume": None,
                    "computed_tokens": row.computed_tokens,
                    "template": template_use(job, row),
                    "loras_from": row.adapters.loras_from if row.adapters.loras else None,
                    "kept": await self._keep(attempt, row),
                }
            else:
                changes[index] = {"resume": _state(row, latents)}
            if not attempt.began_as_asked(index):
                changes[index] = {**changes[index], "begins": None}
        record = await self._change(attempt.request, changes)
        held = {ref.key for row in record.rows for ref in _latents(row)}
        return Written(record, tuple(ref for ref in stored if ref.key not in held))

    async def _keep(self, attempt: Attempt, row: Row) -> tuple[KeptLatent, ...]:
        """Keep what edits with similar prompts may begin with. A store without room keeps less, and fails nothing."""
        region, found = kept_region(attempt.request), list[KeptLatent]()
        for step, latent in attempt.kept.of(row.key.index).items():
            data = await asyncio.to_thread(packed, latent, region)
            try:
                stored = await self._blobs.put(new_key(attempt.request.job.tenant), data, KEPT_S)
            except GiornataError as error:
                log.warning("latent_not_kept", job=row.key.job_id, step=step, error=str(error))
                break
            found.append(KeptLatent(step=step, latents=stored))
        return tuple(found)

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
        key = f"{job.job_id}/latents-{row.key.index}-{secrets.token_hex(4)}"
        keep = self._blobs.hand_over if row.done else self._blobs.put
        return await keep(key, data, job.intermediate_ttl_s)

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
    """What a template did for a row."""
    if job.parameters.reuse is Reuse.OFF:
        return TemplateUse.OFF
    if row.template is not None:
        return TemplateUse.HIT
    return TemplateUse.SKIPPED if row.skipped else TemplateUse.MISS
