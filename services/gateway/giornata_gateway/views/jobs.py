"""Views of a job: its status, and its events.

Steps in the status are the router's, from the workers' telemetry: any gateway can answer without following each job's
events, and is at most a telemetry period behind. The event stream tells every step as it happens.
``image_edit.progress`` is ours: it comes in a job's events, and in a stream that asks for it.
``image_edit.partial_image`` and ``image_edit.completed`` have OpenAI's fields; ``error`` has the shape from which
OpenAI's clients raise. Of a generation, ``image_generation`` stands for ``image_edit``.
"""

from __future__ import annotations

import base64
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from giornata.wire.errors import GiornataError
from giornata.wire.jobs import Box, JobRecord, JobState, Priority, RowRecord
from giornata.wire.messages import JobEstimate, PreviewEvent, StateEvent, StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import OutputFormat
from giornata.wire.resolution import ToldQuality
from giornata.wire.values import StageTimes
from giornata_gateway.views.answers import (
    Background,
    ErrorDetail,
    Usage,
    View,
    background_of,
    error_detail,
    image_url,
    quality_of,
    size_of,
    usage_of,
)

JobKind = Literal["image_edit.job", "image_generation.job"]
ProgressKind = Literal["image_edit.progress", "image_generation.progress"]
PartialImageKind = Literal["image_edit.partial_image", "image_generation.partial_image"]
CompletedKind = Literal["image_edit.completed", "image_generation.completed"]


class TaskEventNames(NamedTuple):
    """The names of a task's jobs and events."""

    job: JobKind
    progress: ProgressKind
    partial_image: PartialImageKind
    completed: CompletedKind


KINDS: Final = {
    Task.EDIT: TaskEventNames(
        "image_edit.job", "image_edit.progress", "image_edit.partial_image", "image_edit.completed"
    ),
    Task.GENERATE: TaskEventNames(
        "image_generation.job",
        "image_generation.progress",
        "image_generation.partial_image",
        "image_generation.completed",
    ),
}


class PictureView(View):
    """One of a job's pictures."""

    index: int
    seed: int
    step: int | None = None
    """Steps computed, while it is running."""
    url: str | None = None
    """Once it is finished."""
    loras_from: int | None = None
    """The step from which its LoRAs acted, counted from 0; null while that is open, and without LoRAs."""
    error: ErrorDetail | None = None


class LoraShare(View):
    """A LoRA that acts on a job's pictures."""

    id: str
    scale: float


class ControlShare(View):
    """A ControlNet that a job's pictures follow."""

    model: str
    scale: float
    start: float
    end: float
    """It acts from this share of the steps on, `start`, until that one."""
    mode: int | None
    """Which kind its control image is, where the ControlNet is a union."""


class JobView(View):
    """Answer of ``POST /v1/jobs``, ``GET /v1/jobs/{id}`` and ``DELETE /v1/jobs/{id}``."""

    id: str
    object: JobKind
    state: JobState
    priority: Priority
    cancelling: bool
    """It was cancelled and ends at its next step."""
    model: str
    attempt: int
    """How often a worker was given rows of it: more than once where several workers share its pictures, or after a
    worker was lost."""
    step: int | None = None
    """Steps that the slowest picture has computed, while the job is running; null where the router does not tell."""
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
    loras: list[LoraShare]
    """In the order of the request, and so are the ControlNets."""
    controlnets: list[ControlShare]
    pictures: list[PictureView]
    usage: Usage | None = None
    """Once completed."""
    error: ErrorDetail | None = None
    """Why the job as a whole failed."""


def job_view(record: JobRecord, base_url: str, forecast: JobEstimate | None = None) -> JobView:
    """The status of a job; the steps of `forecast` are used while it is running."""
    steps = dict(forecast.steps) if forecast else {}
    job = record.job
    running = record.state is JobState.RUNNING and forecast is not None
    total = job.denoising_steps
    done = {
        row.index: total if row.latents else steps.get(row.index, 0) for row in record.rows if not row.error
    }
    completed = record.state is JobState.COMPLETED
    return JobView(
        id=job.job_id,
        object=KINDS[job.task].job,
        state=record.state,
        priority=job.priority,
        cancelling=record.cancel and not record.state.terminal,
        model=job.model,
        attempt=record.attempt,
        step=min(done.values(), default=0) if running else None,
        steps=total,
        size=size_of(record),
        mask_ratio=record.inspection.mask_ratio if record.inspection else None,
        stage_ms=StageTimes(**record.stage_ms.known()),
        slo_met=record.slo_met,
        **forecast_fields(forecast),
        loras=[LoraShare(id=lora.lora_id, scale=lora.scale) for lora in job.loras],
        controlnets=[ControlShare.model_validate(vars(use)) for use in job.controls],
        pictures=[
            _picture(row, done.get(row.index) if running else None, job.job_id, base_url)
            for row in record.told_rows
        ],
        usage=usage_of(record, len(record.told_rows)) if completed else None,
        error=error_detail(record.error) if record.error else None,
    )


def forecast_fields(forecast: JobEstimate | None) -> dict[str, Any]:
    """Return what a job's status and its first event tell of a forecast; nothing where the router does not know."""
    if forecast is None or forecast.position is None or forecast.finish_ms is None:
        return {}
    return {
        "queue_position": forecast.position,
        "predicted_finish_s": round(forecast.finish_ms / 1e3, 3),
    }


def _picture(row: RowRecord, step: int | None, job_id: str, base_url: str) -> PictureView:
    return PictureView(
        index=row.index,
        seed=row.seed,
        step=step,
        url=image_url(base_url, job_id, row.index) if row.image else None,
        loras_from=row.loras_from,
        error=error_detail(row.error) if row.error else None,
    )


class ProgressEvent(View):
    """The job entered a state, or a picture finished a step."""

    type: ProgressKind
    job_id: str
    attempt: int
    """A higher number than before means that the rows began again on another worker."""
    state: JobState
    index: int | None = None
    """Which picture; only with a step."""
    step: int | None = None
    steps: int | None = None


class PictureEvent(View):
    """The fields that the events of one picture have in common."""

    created_at: int = Field(
        description="Unix time in seconds, the same in every replay. Of the end of a job: when the stream took it, or "
        "the time of telling where its last event was lost."
    )
    background: Background = Field(description="Background of the picture in this event.")
    output_format: OutputFormat = Field(description="Format of the picture in this event.")
    quality: ToldQuality = Field(description="As asked; `medium` of `auto` and `standard`.")
    size: str = Field(description="WIDTHxHEIGHT of the picture in this event; `auto` where it is not known.")
    index: int = Field(description="Which picture of the job.")
    job_id: str


class PartialImageEvent(PictureEvent):
    """A preview of an unfinished picture; only where `partial_images` asks for it."""

    type: PartialImageKind
    b64_json: str = Field(
        description="A small preview, at most 32 KiB before base64, of the format and size that this event tells: "
        "about one pixel per latent pixel, to be scaled up to `box`. The finished picture has those asked for."
    )
    partial_image_index: int = Field(description="0 for the first preview of this picture.")
    step: int = Field(description="Steps computed, 1 for the first.")
    steps: int
    box: Box = Field(
        description="Left, top, width, height: the part of the finished picture that the preview shows, in its pixels."
    )
    media_type: str = Field(description="Type of the bytes in `b64_json`.")


class CompletedEvent(PictureEvent):
    """A picture is finished."""

    type: CompletedKind
    b64_json: str | None = None
    """In the stream of a synchronous edit."""
    url: str | None = None
    """In the event stream of an asynchronous job."""
    usage: Usage
    """Tokens of the job's input and of this picture."""
    seed: int


class ErrorEvent(View):
    """A picture, or the whole job, failed."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    index: int | None = None
    """Which picture; null where the whole job failed."""


ToldEvent = ProgressEvent | PartialImageEvent | CompletedEvent | ErrorEvent


def progress_event(task: Task, event: StateEvent | StepEvent) -> ProgressEvent:
    """A state or a step as it is told; a job that takes steps is running."""
    told = {"state": JobState.RUNNING, "type": KINDS[task].progress}
    return ProgressEvent.model_validate(told | vars(event))


def partial_image_event(record: JobRecord, event: PreviewEvent, created_at: int) -> PartialImageEvent:
    """A preview as it is told; the record has been inspected."""
    return PartialImageEvent(
        type=KINDS[record.job.task].partial_image,
        **_common(record, event.index, created_at)
        | {
            "background": "opaque",
            "output_format": event.format,
            "size": "auto" if event.size is None else f"{event.size[0]}x{event.size[1]}",
        },
        b64_json=base64.b64encode(event.image).decode(),
        partial_image_index=event.partial_image_index,
        step=event.step,
        steps=event.steps,
        box=event.box,
        media_type=f"image/{event.format}",
    )


def completed_event(
    record: JobRecord, row: RowRecord, picture: bytes | None, base_url: str, created_at: int
) -> CompletedEvent:
    """A finished picture: inline when its bytes are given, else as a link."""
    return CompletedEvent(
        type=KINDS[record.job.task].completed,
        **_common(record, row.index, created_at),
        b64_json=None if picture is None else base64.b64encode(picture).decode(),
        url=image_url(base_url, record.job.job_id, row.index) if picture is None else None,
        usage=usage_of(record, 1),
        seed=row.seed,
    )


def _common(record: JobRecord, index: int, created_at: int) -> dict[str, Any]:
    return {
        "created_at": created_at,
        "background": background_of(record),
        "output_format": record.job.parameters.output_format,
        "quality": quality_of(record),
        "size": size_of(record),
        "index": index,
        "job_id": record.job.job_id,
    }


def error_event(error: GiornataError, job_id: str, index: int | None = None) -> ErrorEvent:
    """A failure as it is told."""
    return ErrorEvent(error=error_detail(error.body(), job_id), index=index)
