"""The job that a request becomes, and the record of its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from pydantic import ConfigDict, Field

from giornata.wire.adapters import ControlUse, LoraUse
from giornata.wire.errors import ErrorBody, ServiceUnavailable
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import MAX_SEED, EditParameters, Reuse, evaluations_of
from giornata.wire.values import CellMap, ComputeTimes, Grain, RecordModel, StageTimes, digest_of

# The job that a request becomes, and what prepost's stages measure and encode for it.
#
# One request is one job; its `n` pictures are `n` rows with seeds seed + i, one shared inspection and one
# encoding.


TAKE_OVER_S = 600
"""How long a job may outlive its budget while no router carries it."""
Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


class BlobRef(RecordModel):
    """A claim check: the place, the size and the hash of bytes in the blob store."""

    key: str
    size_bytes: int
    sha256: str
    """In hex."""


class Priority(StrEnum):
    """The work queue that a job waits in; interactive jobs are taken first."""

    INTERACTIVE = "interactive"
    """A person or a client waits for the answer."""
    BATCH = "batch"
    """The result is asked for later."""


class JobState(StrEnum):
    """The progress of a job."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Return whether this state is the last."""
        return self in {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}


class Job(RecordModel):
    """An accepted edit or generation, and the envelope in which tenant, digest, time left and trace context travel."""

    job_id: str
    tenant: str
    gateway: str
    """The instance that accepted the job; its name is in the subjects of the job's events."""
    priority: Priority
    model: str
    model_digest: str
    parameters: EditParameters
    """Resolved: every default of the model is filled in."""
    image: BlobRef | None = None
    mask: BlobRef | None = None
    """Where there are `regions`, all of them together."""
    regions: tuple[BlobRef, ...] = ()
    """Masks that are edited one by one, each by a row of its own, for one picture (`auto_edit`)."""
    references: tuple[BlobRef, ...] = ()
    """Files of other pictures that the model looks at, in the request's order."""
    loras: tuple[LoraUse, ...] = ()
    """As `parameters.loras` named them, in that order."""
    controls: tuple[ControlUse, ...] = ()
    """As `parameters.controlnets` named them, in that order."""
    control_images: tuple[BlobRef, ...] = ()
    """Files of control images, in the request's order; see :attr:`ControlUse.image`."""
    template_id: str | None = None
    """The registered template whose picture `image` is."""
    budget_ms: int
    """Time allowed from acceptance to the terminal state."""
    result_ttl_s: int
    traceparent: str | None = None
    weight: float = 1.0
    """The tenant's share where tenants compete: twice the weight, twice the pictures."""
    fingerprint: str | None = None
    """Hashes of the request, where it has an idempotency key; `job_id` is made from that key."""
    evaluations: int | None = None
    """How often the network is evaluated for each row."""
    cfg_scale: float | None = None
    """Read it by :func:`giornata.wire.resolution.guided_by`, which knows jobs of older gateways."""

    @property
    def task(self) -> Task:
        """Return what its pictures are made from."""
        return Task.GENERATE if self.image is None else Task.EDIT

    def check_model(self, card: ModelCard) -> None:
        """Raise ServiceUnavailable if `card` is another version of the model than the job was accepted for."""
        check_version(self.model, self.model_digest, card)

    @property
    def row_count(self) -> int:
        """Rows: one for each picture, or for each region of the one picture."""
        return len(self.regions) or self.parameters.n

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of each row; without a seed, 0 and the next ones."""
        first = self.parameters.seed or 0
        return tuple((first + index) % (MAX_SEED + 1) for index in range(self.row_count))

    @property
    def pictures(self) -> tuple[BlobRef, ...]:
        """All files that came with the request."""
        return tuple(
            ref
            for ref in (self.image, self.mask, *self.regions, *self.references, *self.control_images)
            if ref is not None
        )

    @property
    def denoising_steps(self) -> int:
        """Steps of each row: evaluations of the network."""
        return evaluations_of(self.parameters) if self.evaluations is None else self.evaluations

    @property
    def upload_folder(self) -> str:
        """Begins the keys of the pictures that were stored for this job alone; others belong to their uploader."""
        return f"{self.tenant}/{self.job_id}/"

    @property
    def folder(self) -> str:
        """Begins the keys of what stages make of this job alone."""
        return f"{self.job_id}/{self.tenant}/"

    @property
    def intermediate_ttl_s(self) -> int:
        """How long intermediate results are kept: the budget, and time for another router to take the job over."""
        return -(-self.budget_ms // 1000) + TAKE_OVER_S


def check_version(model: str, digest: str, card: ModelCard) -> None:
    """Raise ServiceUnavailable if `card` has another digest."""
    if digest != card.digest:
        raise ServiceUnavailable(
            f"This instance has another version of the model {model}.",
            received=f"digest {digest[:12]}",
            accepted=f"digest {card.digest[:12]}",
        )


class Inspection(RecordModel):
    """The measurements of prepost's `inspect`: a job's image and mask, or the pictures that are to be generated."""

    width: int
    """The upright original's, in pixels; of a generation, the output's."""
    height: int
    has_alpha: bool
    model_width: int
    """The width of the picture that enters the autoencoder, in pixels; a multiple of a token's side."""
    model_height: int
    output_width: int
    output_height: int
    tokens: int
    """Image tokens of one row: of a UNet, tiles."""
    companion_tokens: int = 0
    """Tokens beside these, by :meth:`giornata.wire.models.ModelCard.companion_tokens`."""
    compute_tokens: int
    """Tokens that the model's mask touches."""
    mask_ratio: float
    """compute_tokens / tokens."""
    compute_set: dict[Grain, CellMap] | None = None
    """The cells that an edit computes where it reuses the others, by grain: every cell that the model's mask touches,
    grown by the job's halo. None where reuse gains nothing: the set holds every token, or the mask touches none."""
    template_key: str
    """Digest of model, family and the pixels that enter the autoencoder; empty of a generation."""
    prepared: BlobRef | None = None
    """uint8 safetensors, None of a generation: `image` (model_height, model_width, 3), `mask` alike, 255 = edit."""
    references: BlobRef | None = None
    """uint8 safetensors of the request's references as they enter the autoencoder, `reference_0` and so on, (height,
    width, 3) each; None without any."""
    reference_grids: tuple[tuple[int, int], ...] = ()
    """Height and width of each of them in tokens."""
    controls: BlobRef | None = None
    """uint8 safetensors of the control images, annotated, of the model's picture's size: `control_0` and so on by the
    job's `controls`, (model_height, model_width, 3) each; None without any."""
    alpha: BlobRef | None = None
    """The effective alpha, for prepost's `finish`."""
    crop: Box | None = None
    """The part of the upright original that the model's picture shows, with `padding_mask_crop`; None for all of it."""
    crops: tuple[Box, ...] = ()
    """As `crop`, of each of the job's regions. Then `prepared` has `image_0`, `mask_0` and so on, all of one size,
    `alpha` has all of them, and `compute_tokens` counts all."""
    compute_ms: float = 0.0

    def computed_by(self, parameters: EditParameters) -> CellMap | None:
        """The tokens that an edit computes where it may reuse the others; None of an edit that computes all."""
        return None if self.compute_set is None or parameters.reuse is Reuse.OFF else self.compute_set[1]

    @property
    def painted_box(self) -> Box:
        """The part of the output picture that the model's picture shows, to the nearest pixel of the output."""
        left, top, width, height = self.crop or (0, 0, self.width, self.height)
        x = [round(edge * self.output_width / self.width) for edge in (left, left + width)]
        y = [round(edge * self.output_height / self.height) for edge in (top, top + height)]
        return x[0], y[0], max(1, x[1] - x[0]), max(1, y[1] - y[0])


class PromptTokens(RecordModel):
    """Tokens of a prompt, without what a pipeline puts around them."""

    given: int
    read: int
    """The first of them, which the picture is made by."""


class Encoding(RecordModel):
    """The output of prepost's `encode`: conditioning of the job and of each row, as safetensors blobs."""

    model_config = ConfigDict(ser_json_bytes="base64")  # earlier versions' records have bytes here

    text: BlobRef
    text_tokens: int
    """Those that pass the network's blocks beside the picture's; 0 of a UNet, which only attends to them."""
    padding_tokens: int = 0
    """Tokens, counted in `text_tokens`, that pad the prompt; 0 where the model's tokenizer does not tell."""
    prompt_tokens: PromptTokens | None = None
    negative_prompt_tokens: PromptTokens | None = None
    """Of the job's prompts; None without one."""
    prefix_tokens: int = 0
    """Beside these, those of one sequence that are computed once, before the first step, and attended to in each."""
    rows: tuple[BlobRef, ...]
    references: BlobRef | None = None
    """Clean latents of the request's references, which all rows share: safetensors of `reference_0` and so on, (height,
    width, channels) each, height and width in tokens; None without any."""
    controls: tuple[BlobRef, ...] = ()
    """What ControlNets see of the control images, by row, or one of all rows: safetensors of `control_0` and so on by
    the job's `controls`. Of UNets (3, height, width) pixels in 0 to 1; else (tokens, channels), packed as latents."""
    empty_text: BlobRef | None = None
    """The empty prompt's conditioning, for template runs; only where the job may reuse."""
    compute_ms: float = 0.0


# The record of a job's progress: its rows, which worker has which of them, and what stages made so far.
#
# The record lives in JetStream's key-value store, is changed by revision only, and reaches a terminal state
# once.


class TemplateUse(StrEnum):
    """The use that a picture made of a template's entries."""

    HIT = "hit"
    """The picture took what was recorded outside its mask."""
    MISS = "miss"
    """The worker that computed the picture had no recording."""
    SKIPPED = "skipped"
    """There was a recording, and computing everything was faster, or the mask left nothing to take; or nothing is
    taken by this sampler, which would not keep the model's picture."""
    OFF = "off"
    """The request asked for no reuse."""


class RowState(RecordModel):
    """A row at a step boundary, as a value with which another worker can go on.

    Noise, mask and template latents are in the row's encoding blob; a step changes none of them.
    """

    step: int
    latents: BlobRef
    """safetensors: `latents` (tokens, channels) float32, row-major; of some samplers also `memory` and `generator`."""
    loras_from: int = 0
    """The step from which its LoRAs act: 0 unless it began without them."""


class RowRecord(RecordModel):
    """One picture of a job."""

    index: int
    seed: int
    attempt: int = 0
    """The attempt that the row is part of, or was last; 0 before its first. A report of another attempt is void."""
    worker: str | None = None
    """The denoiser that has the row in this attempt; None while no denoiser has it."""
    failures: int = 0
    """Lost attempts: the worker died, fell silent or stalled."""
    resume: RowState | None = None
    """The state from which a drained or migrated row goes on."""
    latents: BlobRef | None = None
    computed_tokens: int | None = None
    """Image tokens that each step after the first computed; fewer than all where the others were reused."""
    template: TemplateUse | None = None
    loras_from: int | None = None
    """The step from which its LoRAs acted; None without any."""
    image: BlobRef | None = None
    """The encoded picture, written by prepost's `finish`."""
    error: ErrorBody | None = None
    """Why this picture failed; the others are still delivered."""


class Assignment(NamedTuple):
    """Indices of the rows of a job that one denoiser has together."""

    attempt: int
    worker: str
    rows: tuple[int, ...]


def assignments(rows: Iterable[RowRecord]) -> tuple[Assignment, ...]:
    """Return which worker has which of `rows`, oldest attempt first."""
    held: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        if row.worker is not None:
            held.setdefault((row.attempt, row.worker), []).append(row.index)
    return tuple(
        Assignment(attempt, worker, tuple(found)) for (attempt, worker), found in sorted(held.items())
    )


class JobRecord(RecordModel):
    """The truth about a job. Changed by revision; `completed`, `failed` and `cancelled` are written once."""

    job: Job
    state: JobState = JobState.QUEUED
    attempt: int = 0
    """Counts attempts. An attempt is a set of rows that one denoiser has together; a job may have several at a time."""
    causes: tuple[str, ...] = ()
    """Why each lost attempt was lost."""
    cancel: bool = False
    inspection: Inspection | None = None
    encoding: Encoding | None = None
    rows: tuple[RowRecord, ...] = ()
    stage_ms: StageTimes = Field(default_factory=StageTimes)
    compute_ms: ComputeTimes = Field(default_factory=ComputeTimes)
    remade: int = 0
    """How often lost intermediates were made again."""
    spent_ms: int = 0
    """Time used, so that a standby router keeps to the budget; the gap of a take-over does not count."""
    error: ErrorBody | None = None

    @property
    def pending_rows(self) -> tuple[RowRecord, ...]:
        """Rows that a denoiser still has to compute."""
        return tuple(row for row in self.rows if not (row.latents or row.image or row.error))

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """Return which workers have rows now, oldest attempt first."""
        return assignments(self.rows)

    def freed(
        self, attempt: int, worker: str, change: Callable[[RowRecord], Mapping[str, object]]
    ) -> JobRecord | None:
        """The record with the rows that `worker` has in `attempt` changed and free; None if there are none."""
        rows = tuple(
            row.model_copy(update={**change(row), "worker": None})
            if (row.attempt, row.worker) == (attempt, worker)
            else row
            for row in self.rows
        )
        return None if rows == self.rows else self.model_copy(update={"rows": rows})

    @property
    def slo_met(self) -> bool | None:
        """Whether the job was completed within its `slo_ms`; None while it runs, or where the client named none."""
        slo_ms = self.job.parameters.slo_ms
        if slo_ms is None or not self.state.terminal:
            return None
        return self.state is JobState.COMPLETED and self.spent_ms <= slo_ms

    @property
    def told_rows(self) -> tuple[RowRecord, ...]:
        """Rows as clients see them, one for each picture: of a picture's regions the first one."""
        return self.rows[:1] if self.job.regions else self.rows

    @property
    def images(self) -> tuple[RowRecord, ...]:
        """Rows whose picture is ready."""
        return tuple(row for row in self.rows if row.image is not None)


def picture_id(tenant: str, template_key: str) -> str:
    """The beginning of the ids of all recordings of one picture (`template_key`: model and pixels) of one tenant."""
    return digest_of(tenant, template_key)
