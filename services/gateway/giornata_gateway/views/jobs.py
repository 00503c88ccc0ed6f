"""Views of a job: the answer with its pictures, its status, and its events. Fields beyond OpenAI's are `giornata`.

Steps in the status are the router's, from the workers' telemetry: any gateway can answer without following each job's
events, and is at most a telemetry period behind. The event stream tells every step as it happens.
``image_edit.progress`` is ours: it comes in a job's events, and in a stream that asks for it.
``image_edit.partial_image`` and ``image_edit.completed`` have OpenAI's fields; ``error`` has the shape from which
OpenAI's clients raise. Of a generation, ``image_generation`` stands for ``image_edit``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from giornata.wire.errors import BY_CODE, ErrorBody, Failed, GiornataError, JobCancelled, from_body
from giornata.wire.jobs import Box, JobRecord, JobState, Priority, PromptTokens, RowRecord, TemplateUse
from giornata.wire.messages import JobEstimate, PreviewEvent, StateEvent, StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import OutputFormat, Reuse
from giornata.wire.resolution import QUALITIES, ToldQuality
from giornata.wire.values import ComputeTimes, StageTimes

ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
Background = Literal["opaque", "transparent"]


class View(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class ErrorDetail(View):
    """An error in the fields that OpenAI's clients read, and a few more."""

    code: str
    """Stable; see the list of codes."""
    message: str
    type: ErrorType
    param: str | None = None
    """The field at fault."""
    received: str | None = None
    accepted: str | None = None
    job_id: str | None = None


class ErrorAnswer(View):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class TokenDetails(View):
    """Parts of `input_tokens`."""

    text_tokens: int
    """Text tokens that the network computes, padding among them; 0 of a UNet, which only attends to text."""
    image_tokens: int
    """Tokens of the model's picture: 2 x 2 latent pixels each, and the tiles of a UNet; 0 of a generation."""
    prompt_tokens: PromptTokens | None = None
    negative_prompt_tokens: PromptTokens | None = None
    """How many tokens the prompts have, and how many were read; null where there is none, or it was not told."""


class Usage(View):
    """Tokens of one job's input, and tokens that were painted."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    """Tokens that the mask touches, once per picture; all of a generated one's."""
    total_tokens: int


class ImageData(View):
    """One picture."""

    b64_json: str | None = None
    url: str | None = None


class PictureError(View):
    """Why one of several pictures is missing."""

    index: int
    error: ErrorDetail


class Extension(View):
    """Fields beyond OpenAI's answer."""

    job_id: str
    seeds: list[int]
    """The seeds of the pictures in `data`, in order."""
    stage_ms: StageTimes
    compute_ms: ComputeTimes
    """The part of `stage_ms` that was computing."""
    mask_ratio: float
    steps: int
    """Denoising steps that were computed per picture."""
    reuse: Reuse
    """As the request, its quality or the model has it."""
    computed_tokens: list[int]
    """Image tokens that each step computed, for each picture in `data`. Fewer than the picture has where `reuse` took
    the other tokens from its template, in all steps but the first."""
    template: list[TemplateUse]
    """What a template did for each picture in `data`: `hit`; `miss`, no recording there; `skipped`, a recording not
    worth its load; or `off`. All but `hit` compute everything."""
    loras_from: list[int | None]
    """The step from which LoRAs acted on each picture in `data`, counted from 0; null without LoRAs."""
    slo_met: bool | None
    """Whether the edit was completed within `slo_ms`; null without."""
    errors: list[PictureError]


class ImagesAnswer(View):
    """Answer of ``POST /v1/images/edits`` and ``/v1/images/generations``; OpenAI's ImagesResponse."""

    created: int
    """Unix time in seconds."""
    background: Background
    """`transparent` where the picture has an alpha channel and the format keeps it."""
    data: list[ImageData]
    output_format: OutputFormat
    quality: ToldQuality
    """As asked; `medium` of `auto` and `standard`. `giornata` tells the steps and the reuse that it stood for."""
    size: str
    usage: Usage
    giornata: Extension


def error_type(status: int) -> ErrorType:
    """OpenAI's class of an error by its HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_detail(body: ErrorBody, job_id: str | None = None) -> ErrorDetail:
    """An error as it is shown."""
    return ErrorDetail(
        code=body.code,
        message=_text(body.message),
        type=error_type(BY_CODE.get(body.code, Failed).status),
        param=body.field and _text(body.field),
        received=body.received and _text(body.received),
        accepted=body.accepted,
        job_id=job_id,
    )


def _text(text: str) -> str:
    """`text` as Unicode: headers and names that are not UTF-8 come as lone surrogates, which JSON cannot hold."""
    return text.encode("utf-8", "replace").decode()


def error_of(record: JobRecord) -> GiornataError | None:
    """Return why a terminal job has no picture, or None if it has one."""
    if record.state is JobState.COMPLETED:
        return None
    if record.error is not None:
        return from_body(record.error)
    return JobCancelled() if record.state is JobState.CANCELLED else Failed()


def picture_errors(record: JobRecord) -> list[PictureError]:
    """Return why pictures are missing, where others were made."""
    return [PictureError(index=row.index, error=error_detail(row.error)) for row in record.rows if row.error]


def usage_of(record: JobRecord, pictures: int) -> Usage:
    """Tokens of a job's input and of `pictures` painted masks, or whole pictures."""
    made = record.encoding
    text = made.text_tokens if made else 0
    given = record.inspection if record.job.task is Task.EDIT else None
    image = given.tokens if given else 0
    output = pictures * (record.inspection.compute_tokens if record.inspection else 0)
    return Usage(
        input_tokens=text + image,
        input_tokens_details=TokenDetails(
            text_tokens=text,
            image_tokens=image,
            prompt_tokens=made.prompt_tokens if made else None,
            negative_prompt_tokens=made.negative_prompt_tokens if made else None,
        ),
        output_tokens=output,
        total_tokens=text + image + output,
    )


def size_of(record: JobRecord) -> str:
    """WIDTHxHEIGHT of the pictures."""
    inspection = record.inspection
    return f"{inspection.output_width}x{inspection.output_height}" if inspection else "auto"


def background_of(record: JobRecord) -> Background:
    """Return whether the pictures have an alpha channel."""
    alpha = record.inspection is not None and record.inspection.has_alpha
    keeps = record.job.parameters.output_format is not OutputFormat.JPEG
    return "transparent" if alpha and keeps else "opaque"


def quality_of(record: JobRecord) -> ToldQuality:
    """The quality that was asked for, by the names that OpenAI's answers have."""
    return QUALITIES[record.job.parameters.quality][0]


def image_url(base: str, job_id: str, index: int) -> str:
    """Link to one picture."""
    return f"{base}/v1/jobs/{job_id}/image?index={index}"


def images_answer(
    record: JobRecord, pictures: Mapping[int, bytes] | None, base_url: str, created: int
) -> ImagesAnswer:
    """The synchronous answer of a completed job: `pictures` by index, encoded, or links to them where it is None.

    `created` is the Unix time in seconds.
    """
    job_id = record.job.job_id
    if pictures is None:
        data = [ImageData(url=image_url(base_url, job_id, row.index)) for row in record.images]
    else:
        data = [ImageData(b64_json=base64.b64encode(pictures[row.index]).decode()) for row in record.images]
    return ImagesAnswer(
        created=created,
        background=background_of(record),
        data=data,
        output_format=record.job.parameters.output_format,
        quality=quality_of(record),
        size=size_of(record),
        usage=usage_of(record, len(record.told_rows)),
        giornata=Extension(
            job_id=job_id,
            seeds=[row.seed for row in record.images],
            stage_ms=StageTimes(**record.stage_ms.known()),
            compute_ms=ComputeTimes(**record.compute_ms.known()),
            mask_ratio=record.inspection.mask_ratio if record.inspection else 0.0,
            steps=record.job.denoising_steps,
            reuse=record.job.parameters.reuse,
            computed_tokens=[row.computed_tokens or 0 for row in record.images],
            template=[row.template or TemplateUse.OFF for row in record.images],
            loras_from=[row.loras_from for row in record.images],
            slo_met=record.slo_met,
            errors=picture_errors(record),
        ),
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
    told = {"step": step, "error": row.error and error_detail(row.error)}
    url = image_url(base_url, job_id, row.index) if row.image else None
    return PictureView.model_validate(vars(row) | told | {"url": url})


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
    told = {
        "type": KINDS[record.job.task].partial_image,
        "background": "opaque",
        "output_format": event.format,
        "size": "auto" if event.size is None else f"{event.size[0]}x{event.size[1]}",
        "b64_json": base64.b64encode(event.image).decode(),
        "media_type": f"image/{event.format}",
    }
    return PartialImageEvent.model_validate(vars(event) | _common(record, event.index, created_at) | told)


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
