"""The bodies of answers, made from job records.

Shapes follow OpenAI's image API, so that its clients read them. Fields beyond that API are under `giornata`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from giornata.wire.errors import BY_CODE, ErrorBody, Failed, GiornataError, JobCancelled, from_body
from giornata.wire.jobs import JobRecord, JobState, PromptTokens, TemplateUse
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
            errors=[
                PictureError(index=row.index, error=error_detail(row.error))
                for row in record.rows
                if row.error
            ],
        ),
    )
