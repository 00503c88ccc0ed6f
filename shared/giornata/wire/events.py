"""What is told while a job runs. Kinds are the last token of the subject ``giornata.event.<gateway>.<job>.<kind>``.

A JetStream stream captures these core publishes, so that any gateway can replay them; its sequence number is the id
that ``Last-Event-ID`` names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, Field

from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import Box, JobState
from giornata.wire.requests import OutputFormat
from giornata.wire.times import StageTimes
from giornata.wire.values import Wire

PREVIEW_BYTES: Final = 32 << 10
"""No preview is larger."""
PREVIEW_JOB_BYTES: Final = 512 << 10
"""All previews of one job together are not larger."""


class EventKind(StrEnum):
    """Last token of an event's subject."""

    STATE = "state"
    STEP = "step"
    PREVIEW = "preview"
    DENOISED = "denoised"
    DONE = "done"


class StateEvent(Wire):
    """The job entered a state that is not terminal."""

    job_id: str
    state: JobState
    attempt: int
    queue_position: int | None = None
    """Jobs that are to get a worker before it. Only over NATS, at its acceptance, and where the router knows."""
    predicted_finish_s: float | None = None
    """Until its pictures should be there; likewise."""


class StepEvent(Wire):
    """A row finished a step."""

    job_id: str
    attempt: int
    index: int
    step: int
    """Steps computed, 1 for the first."""
    steps: int


class PreviewEvent(Wire):
    """What a picture looks like so far: its predicted end, small and coarse. Only for jobs that ask for it.

    It goes into the same stream as the other events, so that any gateway replays it in its place. The stream's limit
    holds all the same: a job's previews take at most :data:`PREVIEW_JOB_BYTES`, about what 200 steps of ten pictures
    take, and so push out no more of what others want replayed than those would.
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
    """A file, at most :data:`PREVIEW_BYTES`; one pixel per latent pixel or fewer, to be scaled up to `box`."""
    format: OutputFormat
    """Of `image`."""
    box: Box
    """The part of the output picture that it covers, in pixels of the output: left, top, width, height."""


class DenoisedEvent(Wire):
    """denoiser → router: the record now holds the outcome of all rows of this attempt, or their state at a drain.

    In the same revision the denoiser sets their `worker` to None: nobody has them any more.
    """

    job_id: str
    attempt: int
    worker: str
    denoise_ms: float
    """From the first row's first step to the last row's last."""
    wait_ms: float
    """From the worker's acceptance to the first step."""
    compute_ms: float = 0.0
    """Sum of the engine steps that the rows took part in."""
    handed_back: bool = False
    """The worker is draining: rows without a result are to go on elsewhere from their `resume`."""


class DoneEvent(Wire):
    """The job reached a terminal state."""

    job_id: str
    state: JobState
    error: ErrorBody | None = None
    stage_ms: StageTimes
    slo_met: bool | None = None
    """Whether it was completed within the time that its client wished; None where it wished none."""


EVENT_TYPES: Final[dict[EventKind, type[BaseModel]]] = {
    EventKind.STATE: StateEvent,
    EventKind.STEP: StepEvent,
    EventKind.PREVIEW: PreviewEvent,
    EventKind.DENOISED: DenoisedEvent,
    EventKind.DONE: DoneEvent,
}
"""Payload of each kind."""
