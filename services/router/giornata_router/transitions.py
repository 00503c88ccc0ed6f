"""How a job record changes: pure functions from record to record, applied by revision at the edge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from giornata.scheduling.demand import Demand, RowShape, with_halo
from giornata.wire.errors import AttemptsExhausted, ErrorBody, GiornataError, InternalError
from giornata.wire.jobs import Assignment, Encoding, Inspection, Job, JobRecord, JobState, Row
from giornata.wire.requests import Reuse
from giornata.wire.templates import picture_id
from giornata.wire.times import ComputeTimes, StageTimes


@dataclass(frozen=True)
class Times:
    """Where a job's time went so far."""

    stage_ms: StageTimes
    compute_ms: ComputeTimes
    spent_ms: int

    def fields(self) -> dict[str, Any]:
        """The record's fields of the same names."""
        return {"stage_ms": self.stage_ms, "compute_ms": self.compute_ms, "spent_ms": self.spent_ms}


def accepted(job: Job) -> JobRecord:
    """The first revision: queued, with one row per picture."""
    first = job.parameters.seed or 0
    rows = tuple(Row(index=i, seed=first + i) for i in range(job.parameters.n))
    return JobRecord(job=job, rows=rows)


def entered(record: JobRecord, state: JobState, times: Times) -> JobRecord:
    """The job is now in a state that is not terminal."""
    return record.model_copy(update={"state": state, **times.fields()})


def assigned(
    record: JobRecord,
    assignments: Iterable[Assignment],
    inspection: Inspection,
    encoding: Encoding,
    times: Times,
) -> JobRecord:
    """Rows belong to workers; what is reported of earlier attempts at them is void from here on.

    Rows that have a worker, or need none any more, are left as they are: another router may have been faster.
    """
    given = {row: assignment for assignment in assignments for row in assignment.rows}
    free = {row.index for row in record.pending_rows if row.worker is None}
    rows = tuple(
        row.model_copy(update={"attempt": given[row.index].attempt, "worker": given[row.index].worker})
        if row.index in given and row.index in free
        else row
        for row in record.rows
    )
    return record.model_copy(
        update={
            "state": JobState.RUNNING,
            "attempt": max(record.attempt, *(row.attempt for row in rows)),
            "rows": rows,
            "inspection": inspection,
            "encoding": encoding,
            **times.fields(),
        }
    )


def lost(record: JobRecord, assignment: Assignment, why: str) -> JobRecord | None:
    """The worker of an attempt is gone; None if nobody has its rows any more."""
    attempt, worker, _ = assignment
    freed = record.freed(attempt, worker, lambda row: {"failures": row.failures + 1})
    if freed is None:
        return None
    cause = f"attempt {attempt} on {worker}: {why}"
    return freed.model_copy(update={"causes": (*record.causes, cause)})


def taken_back(record: JobRecord, assignment: Assignment) -> JobRecord | None:
    """The rows of an attempt were handed back or refused: nobody's fault, so no failure is counted."""
    return record.freed(assignment.attempt, assignment.worker, lambda _: {})


def ended(record: JobRecord, rows: tuple[Row, ...], times: Times) -> JobRecord:
    """Every row has a picture or an error: completed if there is at least one picture, else failed."""
    rows = _free(rows)
    images = [row for row in rows if row.image is not None]
    errors = [row.error for row in rows if row.error is not None]
    error = (
        None
        if images
        else (errors[0] if errors else InternalError("The job ended without a picture.").body())
    )
    return record.model_copy(
        update={
            "state": JobState.COMPLETED if images else JobState.FAILED,
            "rows": rows,
            "error": error,
            **times.fields(),
        }
    )


def failed(record: JobRecord, error: GiornataError, times: Times) -> JobRecord:
    """The job as a whole failed."""
    return _closed(record, JobState.FAILED, error.body(), times)


def cancelled(record: JobRecord, error: GiornataError, times: Times) -> JobRecord:
    """Somebody cancelled the job."""
    return _closed(record, JobState.CANCELLED, error.body(), times)


def exhausted(rows: Sequence[Row], causes: Sequence[str], limit: int) -> AttemptsExhausted | None:
    """The error that ends a job of whose `rows` one has lost too many attempts."""
    failures = max((row.failures for row in rows), default=0)
    if failures < limit:
        return None
    return AttemptsExhausted(
        f"{failures} workers were lost while computing this edit.", received="; ".join(causes)
    )


def demand(
    record: JobRecord,
    inspection: Inspection,
    rows: Sequence[Row],
    encoding: Encoding | None,
    *,
    max_failures: int = 0,
) -> Demand:
    """What `rows` ask of workers.

    Rows that were lost with their worker go to one worker together: should they have brought it down, they bring down
    no more than one at a time. Those that have lost all attempts but the last one make that alone, since they may have
    shared their workers with such rows: so they fail alone or are found innocent.
    """
    job, asked = record.job, record.job.parameters
    reuses = asked.reuse is not Reuse.OFF
    computed = (
        with_halo(inspection.compute_tokens, asked.halo, inspection.tokens) if reuses else inspection.tokens
    )
    shapes = tuple(
        RowShape(
            text=encoding.text_tokens if encoding else 0,
            image=inspection.tokens,
            computed=computed,
            steps=max(1, asked.denoising_steps - (row.resume.step if row.resume else 0)),
            sequences=2 if (asked.true_cfg_scale or 0.0) > 1 else 1,
        )
        for row in rows
    )
    failures = max((row.failures for row in rows), default=0)
    return Demand(
        job.model,
        job.model_digest,
        shapes,
        template=picture_id(job.tenant, inspection.template_key) if reuses else None,
        together=failures > 0,
        alone=0 < failures == max_failures - 1,
    )


def _closed(record: JobRecord, state: JobState, error: ErrorBody, times: Times) -> JobRecord:
    rows = _free(record.rows)
    return record.model_copy(update={"state": state, "rows": rows, "error": error, **times.fields()})


def _free(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Nobody has them."""
    return tuple(row.model_copy(update={"worker": None}) for row in rows)
