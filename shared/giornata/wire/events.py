"""Events of a running job. The kind is the last token of the subject ``giornata.event.<gateway>.<job>.<kind>``.

A JetStream stream captures these core publishes, so that any gateway can replay them; its sequence number is the id
that ``Last-Event-ID`` names. Steps are not captured: they are most of the events, and each one replaces the last. Nor
is what a denoiser tells its router alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, Field

from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import Box, JobState
from giornata.wire.requests import OutputFormat
from giornata.wire.values import StageTimes, WireModel

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
    """Width and height of `image`; None of an older denoiser, which does not tell."""


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
