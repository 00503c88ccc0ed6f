"""How a job record changes: pure functions from record to record, applied by revision at the edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from giornata.errors import AttemptsExhausted, ErrorBody, GiornataError, InternalError
from giornata.jobs import ComputeTimes, Encoding, Inspection, Job, JobRecord, JobState, Row, StageTimes
from giornata.requests import Reuse
from giornata.scheduling.demand import Demand, RowShape, with_halo
from giornata.templates import picture_id


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
    record: JobRecord, worker: str, inspection: Inspection, encoding: Encoding, times: Times
) -> JobRecord:
    """The next attempt belongs to `worker`; reports of earlier attempts are void from here on."""
    return record.model_copy(
        update={
            "state": JobState.RUNNING,
            "attempt": record.attempt + 1,
            "owner": worker,
            "inspection": inspection,
            "encoding": encoding,
            **times.fields(),
        }
    )


def lost(record: JobRecord, attempt: int, why: str) -> JobRecord | None:
    """The worker of `attempt` is gone; None if the record has moved on since."""
    if record.attempt != attempt or record.owner is None:
        return None
    causes = (*record.causes, f"attempt {attempt} on {record.owner}: {why}")
    return record.model_copy(update={"owner": None, "failures": record.failures + 1, "causes": causes})


def taken_back(record: JobRecord, attempt: int) -> JobRecord | None:
    """The rows of `attempt` were handed back or refused: nobody's fault, so no failure is counted."""
    if record.attempt != attempt or record.owner is None:
        return None
    return record.model_copy(update={"owner": None})


def ended(record: JobRecord, rows: tuple[Row, ...], times: Times) -> JobRecord:
    """Every row has a picture or an error: completed if there is at least one picture, else failed."""
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
            "owner": None,
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


def exhausted(record: JobRecord, limit: int) -> AttemptsExhausted | None:
    """The error that ends a job which has lost too many attempts."""
    if record.failures < limit:
        return None
    return AttemptsExhausted(
        f"{record.failures} workers were lost while computing this edit.", received="; ".join(record.causes)
    )


def demand(record: JobRecord, inspection: Inspection, *, max_failures: int) -> Demand:
    """What the rows that are still to be computed ask of a worker.

    A job that has lost all attempts but the last one may be what brings workers down, or may have shared them with such
    a job: the last attempt it makes alone, and so fails alone or is found innocent.
    """
    job, asked = record.job, record.job.parameters
    reuses = asked.reuse is not Reuse.OFF
    computed = (
        with_halo(inspection.compute_tokens, asked.halo, inspection.tokens) if reuses else inspection.tokens
    )
    shapes = tuple(
        RowShape(
            text=record.encoding.text_tokens if record.encoding else 0,
            image=inspection.tokens,
            computed=computed,
            steps=max(1, asked.denoising_steps - (row.resume.step if row.resume else 0)),
            sequences=2 if (asked.true_cfg_scale or 0.0) > 1 else 1,
        )
        for row in record.pending_rows
    )
    return Demand(
        job.model,
        job.model_digest,
        shapes,
        template=picture_id(job.tenant, inspection.template_key) if reuses else None,
        alone=0 < record.failures == max_failures - 1,
    )


def _closed(record: JobRecord, state: JobState, error: ErrorBody, times: Times) -> JobRecord:
    return record.model_copy(update={"state": state, "owner": None, "error": error, **times.fields()})
