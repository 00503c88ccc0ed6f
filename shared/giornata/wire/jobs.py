"""What becomes of a request: the job, its rows, and the record that says how far it is.

One request is one job; its `n` pictures are `n` rows with seeds seed + i, one shared inspection and one encoding. The
job record lives in JetStream's key-value store, is changed by revision only, and reaches a terminal state once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from giornata.wire.errors import ErrorBody, ServiceUnavailable
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.times import ComputeTimes, StageTimes
from giornata.wire.values import CellMap, Grain, Wire

TAKE_OVER_S = 600
"""A job may outlive its budget by this while no router carries it."""


Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


class BlobRef(Wire):
    """A claim check: where bytes lie in the blob store, how many, and what they hash to."""

    key: str
    size_bytes: int
    sha256: str


class Priority(StrEnum):
    """Which work queue a job waits in; interactive jobs are taken first."""

    INTERACTIVE = "interactive"
    """Somebody holds a connection open for the answer."""
    BATCH = "batch"
    """Submitted asynchronously."""


class JobState(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
        return self in {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}


class Job(Wire):
    """An accepted edit. It is also the envelope: tenant, digest, time left and trace context travel in it."""

    job_id: str
    tenant: str
    gateway: str
    """Instance whose event subjects the job's events use."""
    priority: Priority
    model: str
    model_digest: str
    parameters: EditParameters
    """Resolved: every default of the model is filled in."""
    image: BlobRef
    mask: BlobRef | None = None
    template_id: str | None = None
    """The registered template that `image` is of."""
    budget_ms: int
    """Time allowed from acceptance to the terminal state."""
    result_ttl_s: int
    """How long results are kept."""
    traceparent: str | None = None
    weight: float = 1.0
    """Share of its tenant beside others, where they compete: twice the weight, twice the pictures."""
    fingerprint: str | None = None
    """What was asked for under the idempotency key that `job_id` was made of; None: it was asked for without one."""

    def check_model(self, card: ModelCard) -> None:
        """Two versions of a model may serve under one name for a while; they never mix in one job.

        Raises:
            ServiceUnavailable: `card` is another version than the job was accepted for.
        """
        check_version(self.model, self.model_digest, card)

    @property
    def intermediate_ttl_s(self) -> int:
        """How long what only the job needs is kept: its budget, and time for another router to take it over."""
        return -(-self.budget_ms // 1000) + TAKE_OVER_S


def check_version(model: str, digest: str, card: ModelCard) -> None:
    """ServiceUnavailable where `card` has another digest."""
    if digest != card.digest:
        raise ServiceUnavailable(
            f"This instance has another version of the model {model}.",
            received=f"digest {digest[:12]}",
            accepted=f"digest {card.digest[:12]}",
        )


class Inspection(Wire):
    """What prepost's `inspect` learned of a job's pictures."""

    width: int
    """Of the upright original, in pixels."""
    height: int
    has_alpha: bool
    model_width: int
    """Of the picture that enters the autoencoder, in pixels; a multiple of two latent pixels."""
    model_height: int
    output_width: int
    output_height: int
    tokens: int
    """Image tokens of one row."""
    compute_tokens: int
    """Tokens that the model's mask touches."""
    mask_ratio: float
    """compute_tokens / tokens."""
    compute_set: dict[Grain, CellMap] | None = None
    """The cells that an edit computes where it reuses the others: those that the model's mask touches, and the job's
    halo around them, at every grain that the family has. None where reuse gains nothing: every token is in it, or
    the mask touches none.
    """
    template_key: str
    """Digest of model, family and the pixels that enter the autoencoder."""
    prepared: BlobRef
    """safetensors, uint8: `image` (model_height, model_width, 3), `mask` (model_height, model_width), 255 = edit."""
    crop: Box | None = None
    """The part of the upright original that the model's picture shows, with `padding_mask_crop`; default all of it."""
    compute_ms: float = 0.0
    """In the image process."""

    @property
    def painted_box(self) -> Box:
        """The part of the output picture that the model's picture shows, to the nearest pixel of the output."""
        left, top, width, height = self.crop or (0, 0, self.width, self.height)
        x = [round(edge * self.output_width / self.width) for edge in (left, left + width)]
        y = [round(edge * self.output_height / self.height) for edge in (top, top + height)]
        return x[0], y[0], max(1, x[1] - x[0]), max(1, y[1] - y[0])


class Encoding(Wire):
    """What prepost's `encode` made: conditioning of the whole job and of each row, as safetensors blobs."""

    text: BlobRef
    text_tokens: int
    rows: tuple[BlobRef, ...]
    empty_text: BlobRef | None = None
    """Of the empty prompt, which template runs have; only where the job may reuse."""
    compute_ms: float = 0.0
    """In the model's thread."""


class TemplateUse(StrEnum):
    """What a template did for a picture."""

    HIT = "hit"
    """What it had recorded outside the mask was taken."""
    MISS = "miss"
    """It was not recorded where the picture was computed."""
    SKIPPED = "skipped"
    """It was recorded there; computing everything was faster, or the mask left nothing to take."""
    OFF = "off"
    """It was not asked for."""


class RowState(Wire):
    """A row at a step boundary, as a value: enough to go on elsewhere.

    The row's noise, mask and template latents are in its encoding blob; only what a step changes is here.
    """

    step: int
    """Steps already computed."""
    latents: BlobRef
    """safetensors: `latents` (tokens, 4 * latent_channels) float32, packed row-major."""


class Row(Wire):
    """One picture of a job."""

    index: int
    seed: int
    attempt: int = 0
    """Number of the attempt that it is part of, or was last; 0 before its first. A report of another is void."""
    worker: str | None = None
    """Denoiser that has it in this attempt; None while nobody has it."""
    failures: int = 0
    """Attempts at it that were lost: the worker died, fell silent or stalled."""
    resume: RowState | None = None
    """Where a drained or migrated row goes on."""
    latents: BlobRef | None = None
    """Final latents, written by the denoiser."""
    computed_tokens: int | None = None
    """Image tokens that each step computed; fewer than there are where the others were reused, in all steps but the
    first.
    """
    template: TemplateUse | None = None
    """What a template did for it, written with the final latents."""
    image: BlobRef | None = None
    """The encoded picture, written by prepost's `finish`."""
    error: ErrorBody | None = None
    """Why this picture failed; the others are still delivered."""


class Assignment(NamedTuple):
    """Rows of a job that one denoiser was given together."""

    attempt: int
    worker: str
    rows: tuple[int, ...]
    """Their indices."""


def assignments(rows: Iterable[Row]) -> tuple[Assignment, ...]:
    """Who has which of `rows`, oldest attempt first."""
    held: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        if row.worker is not None:
            held.setdefault((row.attempt, row.worker), []).append(row.index)
    return tuple(
        Assignment(attempt, worker, tuple(found)) for (attempt, worker), found in sorted(held.items())
    )


class JobRecord(Wire):
    """The truth about a job. Changed by revision; `completed`, `failed` and `cancelled` are written once."""

    job: Job
    state: JobState = JobState.QUEUED
    attempt: int = 0
    """Counts attempts: rows that one denoiser was given together. Those of one job may be computed side by side."""
    causes: tuple[str, ...] = ()
    """How each attempt was lost that was lost."""
    cancel: bool = False
    """Somebody asked to cancel."""
    inspection: Inspection | None = None
    encoding: Encoding | None = None
    rows: tuple[Row, ...] = ()
    stage_ms: StageTimes = Field(default_factory=StageTimes)
    compute_ms: ComputeTimes = Field(default_factory=ComputeTimes)
    spent_ms: int = 0
    """Time used up so far, so that a standby router keeps to the budget; the gap of a take-over is not counted."""
    error: ErrorBody | None = None
    """Why the job as a whole failed."""

    @property
    def pending_rows(self) -> tuple[Row, ...]:
        """Rows that a denoiser still has to compute."""
        return tuple(row for row in self.rows if row.latents is None and row.error is None)

    @property
    def failures(self) -> int:
        """Attempts that were lost."""
        return len(self.causes)

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """Who has rows now, oldest attempt first."""
        return assignments(self.rows)

    def freed(
        self, attempt: int, worker: str, change: Callable[[Row], Mapping[str, object]]
    ) -> JobRecord | None:
        """With the rows that `worker` has in `attempt` changed, and nobody's any more; None if it has none of them."""
        rows = tuple(
            row.model_copy(update={**change(row), "worker": None})
            if (row.attempt, row.worker) == (attempt, worker)
            else row
            for row in self.rows
        )
        return None if rows == self.rows else self.model_copy(update={"rows": rows})

    @property
    def slo_met(self) -> bool | None:
        """Whether an ended job was completed within the time that its client wished; None where it wished none."""
        slo_ms = self.job.parameters.slo_ms
        if slo_ms is None or not self.state.terminal:
            return None
        return self.state is JobState.COMPLETED and self.spent_ms <= slo_ms

    @property
    def images(self) -> tuple[Row, ...]:
        """Rows whose picture is ready."""
        return tuple(row for row in self.rows if row.image is not None)
