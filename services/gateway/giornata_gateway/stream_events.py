"""What a stream of server-sent events tells: job events as OpenAI's event types and ours. Pure.

``image_edit.progress`` is ours (OpenAI's clients pass unknown types on); ``image_edit.completed`` has OpenAI's fields;
``error`` has the shape from which OpenAI's clients raise.
"""

from __future__ import annotations

import base64
from typing import Literal

from giornata.errors import GiornataError
from giornata.events import StateEvent, StepEvent
from giornata.jobs import JobRecord, JobState, Row
from giornata.requests import OutputFormat
from giornata_gateway.answers import (
    ErrorDetail,
    Usage,
    View,
    background_of,
    error_detail,
    image_url,
    size_of,
    usage_of,
)

PROGRESS = "image_edit.progress"
COMPLETED = "image_edit.completed"
ERROR = "error"


class ProgressEvent(View):
    """The job entered a state, or a picture finished a step."""

    type: Literal["image_edit.progress"] = "image_edit.progress"
    job_id: str
    attempt: int
    """A higher one than before means that the rows began again on another worker."""
    state: JobState
    index: int | None = None
    """Of the picture; only with a step."""
    step: int | None = None
    steps: int | None = None


class CompletedEvent(View):
    """A picture is finished."""

    type: Literal["image_edit.completed"] = "image_edit.completed"
    b64_json: str | None = None
    """In the stream of a synchronous edit."""
    url: str | None = None
    """In the event stream of an asynchronous job."""
    created_at: int
    background: Literal["opaque", "transparent"]
    output_format: OutputFormat
    quality: Literal["auto"] = "auto"
    size: str
    usage: Usage
    """Of the job's input and this picture."""
    index: int
    job_id: str
    seed: int


class ErrorEvent(View):
    """A picture, or the whole job, failed."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    index: int | None = None
    """Of the picture, where others may have succeeded."""


def progress_event(event: StateEvent | StepEvent) -> ProgressEvent:
    """A state or a step as it is told."""
    if isinstance(event, StateEvent):
        return ProgressEvent(job_id=event.job_id, attempt=event.attempt, state=event.state)
    return ProgressEvent(
        job_id=event.job_id,
        attempt=event.attempt,
        state=JobState.RUNNING,
        index=event.index,
        step=event.step,
        steps=event.steps,
    )


def completed_event(
    record: JobRecord, row: Row, picture: bytes | None, base_url: str, now: int
) -> CompletedEvent:
    """A finished picture: inline when its bytes are given, else as a link."""
    return CompletedEvent(
        b64_json=None if picture is None else base64.b64encode(picture).decode(),
        url=image_url(base_url, record.job.job_id, row.index) if picture is None else None,
        created_at=now,
        background=background_of(record),
        output_format=record.job.parameters.output_format,
        size=size_of(record),
        usage=usage_of(record, 1),
        index=row.index,
        job_id=record.job.job_id,
        seed=row.seed,
    )


def error_event(error: GiornataError, job_id: str, index: int | None = None) -> ErrorEvent:
    """A failure as it is told."""
    return ErrorEvent(error=error_detail(error.body(), job_id), index=index)
