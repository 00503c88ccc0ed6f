"""The record of a job's progress: its rows, which worker has which of them, and what stages made so far.

The record lives in JetStream's key-value store, is changed by revision only, and reaches a terminal state once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field, field_validator

from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobState
from giornata.wire.values import ComputeTimes, RecordModel, StageTimes


class TemplateUse(StrEnum):
    """What a template's recording did for a picture."""

    HIT = "hit"
    """The picture took what was recorded outside its mask."""
    MISS = "miss"
    """The worker that computed the picture had no recording."""
    SKIPPED = "skipped"
    """There was a recording; computing everything was faster, or the mask left nothing to take."""
    OFF = "off"
    """The request asked for no reuse."""


class RowState(RecordModel):
    """A row at a step boundary, as a value with which another worker can go on.

    Noise, mask and template latents are in the row's encoding blob; a step changes none of them.
    """

    step: int
    """Steps computed."""
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
    """Final latents, written by the denoiser."""
    computed_tokens: int | None = None
    """Image tokens that each step after the first computed; fewer than all where the others were reused."""
    template: TemplateUse | None = None
    loras_from: int | None = None
    """The step from which its LoRAs acted; None without any."""
    image: BlobRef | None = None
    """The encoded picture, written by prepost's `finish`."""
    error: ErrorBody | None = None
    """Why this picture failed; the others are still delivered."""

    @field_validator("resume", mode="before")
    @classmethod
    def _is_its_own(cls, state: object) -> object:
        """None for the latents of another row, which earlier versions let a row begin with."""
        return None if isinstance(state, Mapping) and state.get("another") else state


class Assignment(NamedTuple):
    """Indices of the rows of a job that one denoiser has together."""

    attempt: int
    worker: str
    rows: tuple[int, ...]


def assignments(rows: Iterable[RowRecord]) -> tuple[Assignment, ...]:
    """Which worker has which of `rows`, oldest attempt first."""
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
        """Which workers have rows now, oldest attempt first."""
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
