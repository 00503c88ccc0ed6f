"""How far an asynchronous job is, as its status shows it.

Steps come from the workers' telemetry: any gateway can answer without following each job's events, and is at most a
telemetry period behind. The job's event stream tells every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from giornata.wire.jobs import JobRecord, JobState, RowRecord
from giornata.wire.messages import Forecast
from giornata.wire.values import StageTimes
from giornata.wire.workers import RowProgress, ServiceState
from giornata_gateway.views.answers import (
    ErrorDetail,
    Usage,
    View,
    error_detail,
    image_url,
    size_of,
    usage_of,
)


class PictureView(View):
    """One of a job's pictures."""

    index: int
    seed: int
    step: int | None = None
    """Steps computed, while it is running."""
    url: str | None = None
    """Once it is finished."""
    error: ErrorDetail | None = None


class JobView(View):
    """Answer of ``POST /v1/jobs``, ``GET /v1/jobs/{id}`` and ``DELETE /v1/jobs/{id}``."""

    id: str
    object: Literal["image_edit.job"] = "image_edit.job"
    state: JobState
    cancelling: bool
    """It was cancelled and ends at its next step."""
    model: str
    attempt: int
    """How often a worker was given rows of it: more than once where several workers share its pictures, or after a
    worker was lost."""
    step: int | None = None
    """Steps that the slowest picture has computed, while the job is running."""
    steps: int
    """Denoising steps per picture."""
    size: str
    mask_ratio: float | None = None
    stage_ms: StageTimes
    queue_position: int | None = None
    """Jobs that get a worker before it; 0 once it has one. Null where that is over, or not known."""
    predicted_finish_s: float | None = None
    """Seconds until its pictures should be there; null where that is over, or not known."""
    slo_met: bool | None = None
    """Once ended: whether it was completed within `slo_ms`; null without."""
    pictures: list[PictureView]
    usage: Usage | None = None
    """Once completed."""
    error: ErrorDetail | None = None
    """Why the job as a whole failed."""


def steps_of(record: JobRecord, states: Iterable[ServiceState]) -> dict[int, int]:
    """Steps computed per picture, from the workers' telemetry."""
    job_id, attempts = record.job.job_id, {row.index: row.attempt for row in record.rows}
    progress: list[RowProgress] = []
    for state in states:
        if state.worker:
            progress += [*state.worker.running, *state.worker.waiting]
    return {
        row.index: row.step
        for row in progress
        if row.job_id == job_id and row.attempt == attempts.get(row.index)
    }


def job_view(
    record: JobRecord, steps: dict[int, int], base_url: str, forecast: Forecast | None = None
) -> JobView:
    """The status of a job.

    Args:
        record: the truth.
        steps: steps computed per picture, see :func:`steps_of`; used while the job is running.
        base_url: how clients reach this gateway.
        forecast: the router's, where it knows.
    """
    job = record.job
    running = record.state is JobState.RUNNING
    total = job.parameters.denoising_steps
    done = {
        row.index: total if row.latents else steps.get(row.index, 0) for row in record.rows if not row.error
    }
    completed = record.state is JobState.COMPLETED
    return JobView(
        id=job.job_id,
        state=record.state,
        cancelling=record.cancel and not record.state.terminal,
        model=job.model,
        attempt=record.attempt,
        step=min(done.values(), default=0) if running else None,
        steps=total,
        size=size_of(record),
        mask_ratio=record.inspection.mask_ratio if record.inspection else None,
        stage_ms=record.stage_ms,
        slo_met=record.slo_met,
        queue_position=position_of(forecast),
        predicted_finish_s=finish_s_of(forecast),
        pictures=[
            _picture(row, done.get(row.index) if running else None, job.job_id, base_url)
            for row in record.rows
        ],
        usage=usage_of(record, len(record.rows)) if completed else None,
        error=error_detail(record.error) if record.error else None,
    )


def position_of(forecast: Forecast | None) -> int | None:
    """`queue_position`; None where the router does not know."""
    return forecast.position if forecast else None


def finish_s_of(forecast: Forecast | None) -> float | None:
    """`predicted_finish_s`; None where the router does not know."""
    return round(forecast.finish_ms / 1e3, 3) if forecast else None


def _picture(row: RowRecord, step: int | None, job_id: str, base_url: str) -> PictureView:
    return PictureView(
        index=row.index,
        seed=row.seed,
        step=step,
        url=image_url(base_url, job_id, row.index) if row.image else None,
        error=error_detail(row.error) if row.error else None,
    )
