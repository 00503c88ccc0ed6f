"""The questions services ask each other by request-reply, and the events of running jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import (
    BlobRef,
    Box,
    Encoding,
    Inspection,
    Job,
    JobState,
    Priority,
    PromptTokens,
    RowRecord,
)
from giornata.wire.loras import NormaliseLora
from giornata.wire.requests import (
    MAX_REGIONS,
    EditParameters,
    GenerationParameters,
    MaskWords,
    ModelName,
    OutputFormat,
    SegmentationFields,
)
from giornata.wire.templates import TemplateInputs, TemplateRecord
from giornata.wire.values import StageTimes, WireModel

# The questions services ask each other by request-reply. Every request carries the milliseconds it may
# take.


class Epoch(NamedTuple):
    """The rank of a leading router: of two routers, the one with the higher epoch has taken the lease later."""

    created_us: int
    """When the stream of the lease was made, in microseconds since 1970: in a new one revisions begin again at 1."""
    revision: int
    """With which the lease was taken; renewals do not change it."""


class SubmitRequest(WireModel):
    """gateway → router: make this job durable and carry it out. Idempotent on the job's id."""

    job: Job
    remaining_ms: int


class JobAck(WireModel):
    """router → gateway: the job is in JetStream."""

    job_id: str


class JobEstimate(WireModel):
    """The router's estimate of when a job has its pictures, and how far they are."""

    position: int | None = None
    """Jobs that get a worker before this one; 0 for the next job, and for a job that has a worker. None: unknown."""
    finish_ms: float | None = None
    """Time from now until its rows are computed, decoded and pasted; None with an unknown position."""
    steps: tuple[tuple[int, int], ...] = ()
    """Index and steps computed of each row that a worker has."""


class JobEstimateRequest(WireModel):
    """gateway → router: when will a job be denoised? Answered by a :class:`JobEstimate`."""

    job_id: str
    remaining_ms: int


class InspectRequest(WireModel):
    """router → prepost: decode and measure; answered by an :class:`~giornata.wire.jobs.Inspection`."""

    job: Job
    remaining_ms: int


class EncodeRequest(WireModel):
    """router → prepost: conditioning of all rows; answered by an :class:`~giornata.wire.jobs.Encoding`."""

    job: Job
    inspection: Inspection
    remaining_ms: int


class FinishRequest(WireModel):
    """router → prepost: decode one row's latents, paste, encode."""

    job: Job
    inspection: Inspection
    index: int
    latents: BlobRef
    others: tuple[BlobRef, ...] = ()
    """Latents of the regions after the first one, where the job has several: all are pasted into one picture."""
    remaining_ms: int


class FinishReply(WireModel):
    """prepost → router: the finished picture, and how long it took."""

    image: BlobRef
    decode_ms: float
    paste_ms: float


class RunRequest(WireModel):
    """router → one denoiser: compute these rows. Idempotent on job and attempt."""

    job: Job
    attempt: int
    inspection: Inspection
    encoding: Encoding
    rows: tuple[RowRecord, ...]
    remaining_ms: int
    denoise_within_ms: float | None = None
    """Time left until the last step of these rows should end, so that the job ends as its client wishes: what decoding
    and pasting are expected to take is off. Negative where it has passed; None for no wish."""
    epoch: Epoch | None = None


class RunAnswer(StrEnum):
    """A denoiser's answer to rows; the router asks another one unless they are accepted."""

    ACCEPTED = "accepted"
    FULL = "full"
    DRAINING = "draining"
    STALE = "stale"
    """Another router leads now: the worker has heard of a higher epoch."""


class RunReply(WireModel):
    """denoiser → router."""

    answer: RunAnswer


class CancelRows(WireModel):
    """router → one denoiser: drop the rows of this attempt; another worker has them.

    gateway → all: a job is cancelled, which its record says too; without epoch.
    """

    job_id: str
    attempt: int
    epoch: Epoch | None = None
    hand_back: Literal[True] | None = None
    """No other worker has them yet: they are reported as they are now, and go on later."""


MASK: Final = "mask"
"""Name of the mask that shows all regions together, where masks are kept."""


class MaskCard(WireModel):
    """A model that makes masks from words."""

    name: str
    """As its operator calls it: a folder's name, or a hub id."""
    threshold: float
    """The least score of a region, where a request names none."""


def region_name(index: int) -> str:
    """The name of one region's own mask, where masks are kept."""
    return f"region_{index}"


def _of_mask(name: str) -> str | None:
    """The description of a field that edits have too."""
    told = SegmentationFields.model_fields[name].description or ""
    return told.replace("`mask_prompt`", "`prompt`")


class MaskParameters(WireModel):
    """The parameters of a request for a mask alone."""

    prompt: MaskWords = Field(description='What the mask shows, in words: "the left shoe".')
    mask_threshold: float | None = Field(None, gt=0, le=1, description=_of_mask("mask_threshold"))
    max_regions: int | None = Field(None, ge=1, le=MAX_REGIONS, description=_of_mask("max_regions"))
    model: ModelName | None = Field(
        None,
        description="Name of a model beside which masks are made; default: any. Masks do not depend on what paints.",
    )

    def asked(self) -> SegmentationFields:
        """The same as fields of an edit."""
        return SegmentationFields(
            mask_prompt=self.prompt, mask_threshold=self.mask_threshold, max_regions=self.max_regions
        )


class MaskMessage(WireModel):
    """The message of the NATS door ``giornata.mask``: a mask from words by request-reply."""

    parameters: MaskParameters
    image: bytes | BlobRef
    remaining_ms: int = 60_000
    api_key: str | None = None


class MaskPicture(WireModel):
    """A PNG of the upright picture's size, white on black: inline where it fits into the reply, else a claim check."""

    data: bytes | None = None
    ref: BlobRef | None = None


class MaskedRegion(MaskPicture):
    """One thing in the picture, with its own mask."""

    score: float
    """As of :class:`FoundRegion`, and so are the others."""
    box: Box
    area: int


class MaskMessageReply(MaskPicture):
    """The NATS door's answer to :class:`MaskMessage`: the mask of all regions together, and each region's own."""

    width: int
    """The upright picture's, in pixels."""
    height: int
    regions: tuple[MaskedRegion, ...]
    """The best score first; there is at least one."""
    threshold: float
    """The least score that a region had to have."""
    model: str


class MaskRequest(WireModel):
    """gateway → prepost: what do these words name in this picture? Answered by a :class:`MaskReply`.

    Asked again it keeps the same blobs again: the gateway names their place.
    """

    image: BlobRef
    prompt: str
    threshold: float | None = None
    """The least score; None for the model's own."""
    max_regions: int = MAX_REGIONS
    folder: str
    """Begins the keys of the masks, and ends in a slash."""
    ttl_s: int
    each: bool = False
    """Whether every region's own mask is kept, too."""
    remaining_ms: int


class FoundRegion(WireModel):
    """One thing in the picture."""

    score: float
    """How sure the model is, in 0 to 1."""
    box: Box
    """The smallest that holds it, in pixels of the upright picture."""
    area: int
    mask: BlobRef | None = None
    """PNG of the upright picture's size, white on black; None unless :attr:`MaskRequest.each` asks for it."""


class MaskReply(WireModel):
    """prepost → gateway: what was found. There is at least one region: NothingFound is raised where there is none."""

    width: int
    """The upright picture's, in pixels."""
    height: int
    regions: tuple[FoundRegion, ...]
    """The best score first."""
    mask: BlobRef
    """All of them together: PNG of the upright picture's size, white on black."""
    threshold: float
    model: str
    compute_ms: float
    """Time in the model's thread."""


class TemplateRequest(WireModel):
    """gateway → router: record this template, unless it is; answered by its record. router → prepost: by its inputs."""

    template: TemplateRecord
    remaining_ms: int


Question = InspectRequest | EncodeRequest | FinishRequest | TemplateRequest | NormaliseLora | MaskRequest
"""The questions to prepost."""


def question(request: Question) -> str:
    """The name of a question; the same when it is asked again."""
    match request:
        case InspectRequest():
            return f"inspect {request.job.job_id}"
        case EncodeRequest():
            return f"encode {request.job.job_id}"
        case FinishRequest():
            return f"finish {request.job.job_id} {request.index}"
        case TemplateRequest():
            return f"template {request.template.template_id}"
        case NormaliseLora():
            return f"adapter {request.lora.lora_id}"
        case MaskRequest():
            return f"mask {request.folder}"


class RecordRequest(WireModel):
    """router → one denoiser: record this template beside the edits. The template's record tells the outcome."""

    template: TemplateRecord
    inputs: TemplateInputs
    remaining_ms: int
    epoch: Epoch | None = None


class PrefetchTemplate(WireModel):
    """router → one denoiser: an edit of this picture probably comes; load what it needs ahead of it.

    That is the picture's recording, from disk into memory, and the LoRAs.
    """

    job: Job
    inspection: Inspection
    epoch: Epoch | None = None


class RemoveTemplate(WireModel):
    """gateway → every denoiser: forget the recordings of this template. Running rows go on."""

    tenant: str
    template_key: str


INLINE_BYTES: Final = 6 << 20
"""All pictures of a message together, inline; larger ones travel as claim checks."""
IDEMPOTENCY_HEADER: Final = "Nats-Msg-Id"
"""Header of a message of the NATS door that carries its idempotency key; NATS's own name for one."""
EVENT_HEADER: Final = "Giornata-Event"
"""Header of a progress message: the event's kind (:class:`~giornata.wire.messages.EventKind`)."""


class GenerateMessage(WireModel):
    """The message of the NATS door ``giornata.generate``: pictures from text by request-reply."""

    parameters: GenerationParameters
    remaining_ms: int = 120_000
    priority: Priority = Priority.INTERACTIVE
    reference: tuple[bytes | BlobRef, ...] = ()
    control_image: tuple[bytes | BlobRef, ...] = ()
    """What ControlNets see, as `parameters.controlnets` count them."""
    progress: str | None = None
    """Subject to which the job's events are published while it runs; default none."""
    api_key: str | None = None


class EditMessage(GenerateMessage):
    """The message of the NATS door ``giornata.edit``: a whole edit by request-reply."""

    parameters: EditParameters
    image: bytes | BlobRef | None = None
    template_id: str | None = None
    """A registered template, instead of an image."""
    mask: bytes | BlobRef | None = None


class ProbeMessage(EditMessage):
    """profiler → gateway: an edit on behalf of a tenant. It has no API key, and the tenant's limits do not hold."""

    tenant: str
    """Whose LoRAs the edit may name."""


class CancelMessage(WireModel):
    """Cancel a job: ``giornata.edit.cancel``. Answered by :class:`JobAck` once the record says so."""

    job_id: str
    remaining_ms: int = 5_000
    api_key: str | None = None


class Picture(WireModel):
    """One finished picture: inline when it fits into the reply, else a claim check."""

    index: int
    seed: int
    data: bytes | None = None
    ref: BlobRef | None = None
    loras_from: int | None = None
    """The step from which LoRAs acted on it, counted from 0; None without LoRAs."""


class EditReply(WireModel):
    """The NATS door's answer when the job is done."""

    job_id: str
    width: int
    height: int
    output_format: OutputFormat
    pictures: tuple[Picture, ...]
    errors: tuple[str, ...] = ()
    """Sentences of the pictures that failed, when others succeeded."""
    prompt_tokens: PromptTokens | None = None
    negative_prompt_tokens: PromptTokens | None = None
    """How much of the prompts was read; None without one."""


# Events of a running job. The kind is the last token of the subject
# ``giornata.event.<gateway>.<job>.<kind>``.
#
# A JetStream stream captures these core publishes, so that any gateway can replay them; its sequence number
# is the id that ``Last-Event-ID`` names. Steps are not captured: they are most of the events, and each one
# replaces the last. Nor is what a denoiser tells its router alone.


PREVIEW_BYTES: Final = 32 << 10
PREVIEW_JOB_BYTES: Final = 512 << 10
"""Largest preview, and largest sum of the previews of one job."""


class EventKind(StrEnum):
    """Last token of an event's subject."""

    STATE = "state"
    STEP = "step"
    PREVIEW = "preview"
    DENOISED = "denoised"
    DONE = "done"


KEPT: Final = (EventKind.STATE, EventKind.PREVIEW, EventKind.DONE)
"""The kinds that the stream captures."""


class StateEvent(WireModel):
    """The job entered a state; it is not the last."""

    job_id: str
    state: JobState
    attempt: int
    queue_position: int | None = None
    """Jobs that get a worker before this one. Only over NATS, at the acceptance, and if the router knows."""
    predicted_finish_s: float | None = None
    """Time until the pictures should be there, under the same conditions."""


class StepEvent(WireModel):
    """A row finished a step."""

    job_id: str
    attempt: int
    index: int
    step: int
    """Steps computed, 1 for the first."""
    steps: int


class PreviewEvent(WireModel):
    """A preview: the predicted picture, small and coarse. Only for jobs that ask for previews.

    A job's previews take at most :data:`PREVIEW_JOB_BYTES`, about as much as the other events of a job with 200 steps
    and ten pictures, so that they push few events of other jobs out of the stream.
    """

    job_id: str
    attempt: int
    index: int
    step: int
    """Steps computed, 1 for the first; never the last one."""
    steps: int
    partial_image_index: int
    """0 for the picture's first preview."""
    image: bytes = Field(repr=False)
    """A file of at most :data:`PREVIEW_BYTES`; at most one pixel per latent pixel, to be scaled up to `box`."""
    format: OutputFormat
    box: Box
    """The part of the output picture that the preview covers, in pixels of the output."""
    size: tuple[int, int] | None = None


class DenoisedEvent(WireModel):
    """denoiser → router: the record holds the outcome of all rows of this attempt, or their state at a drain.

    In the same revision the denoiser has set their `worker` to None.
    """

    job_id: str
    attempt: int
    worker: str
    denoise_ms: float
    """From the first row's first step to the last row's last."""
    wait_ms: float
    """From the worker's acceptance to the first step."""
    compute_ms: float = 0.0
    """Sum of the engine steps with rows of this attempt."""
    handed_back: bool = False
    """The worker drains: rows without a result go on elsewhere from their `resume`."""


class DoneEvent(WireModel):
    """The job has ended."""

    job_id: str
    state: JobState
    error: ErrorBody | None = None
    stage_ms: StageTimes
    slo_met: bool | None = None


EVENT_TYPES: Final[dict[EventKind, type[BaseModel]]] = {
    EventKind.STATE: StateEvent,
    EventKind.STEP: StepEvent,
    EventKind.PREVIEW: PreviewEvent,
    EventKind.DENOISED: DenoisedEvent,
    EventKind.DONE: DoneEvent,
}
