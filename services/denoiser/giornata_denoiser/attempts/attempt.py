"""An attempt at a job, from its acceptance by this worker to its report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from giornata.scheduling.batch import RowKey
from giornata.tracing import NO_STEPS
from giornata.wire.errors import GiornataError
from giornata.wire.messages import RunRequest
from giornata.wire.workers import RowProgress
from giornata_denoiser.engine.protocol import StepReport
from giornata_denoiser.engine.step_budget import skipped_steps
from giornata_denoiser.rows.row import Row

AttemptKey = tuple[str, int]
"""Job id and number of the attempt."""


def key_of(key: RowKey) -> AttemptKey:
    """The attempt that a row belongs to."""
    return key.job_id, key.attempt


class Attempt:
    """The rows of one attempt, and how far they are."""

    def __init__(self, request: RunRequest, accepted_s: float) -> None:
        self.request = request
        self.rows: dict[int, Row] = {}
        """By index, as of their last step; empty until their inputs are there."""
        self.errors: dict[int, GiornataError] = {}
        """By index: rows that failed."""
        self.compute_ms = 0.0
        """Sum of the steps that the rows took part in."""
        self.traced = NO_STEPS
        """Takes in the steps, where the attempt has a span."""
        self._accepted_s = self._ended_s = accepted_s
        within_ms = request.denoise_within_ms
        self.due_s = math.inf if within_ms is None else accepted_s + within_ms / 1e3
        """When the last of its rows is to have ended; infinite without a wish."""
        self._began_s: float | None = None

    @property
    def key(self) -> AttemptKey:
        """Job id and number of the attempt."""
        return self.request.job.job_id, self.request.attempt

    @property
    def indices(self) -> frozenset[int]:
        """Indices of all its rows."""
        return frozenset(row.index for row in self.request.rows)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the rows that have neither a final latent nor an error."""
        ended = self.errors.keys() | {index for index, row in self.rows.items() if row.done}
        return tuple(row.index for row in self.request.rows if row.index not in ended)

    @property
    def wait_ms(self) -> float:
        """Time from acceptance to the first step."""
        return 0.0 if self._began_s is None else (self._began_s - self._accepted_s) * 1e3

    @property
    def denoise_ms(self) -> float:
        """Time from the first row's first step to the last row's last."""
        return 0.0 if self._began_s is None else (self._ended_s - self._began_s) * 1e3

    def advance(self, report: StepReport) -> tuple[Row, ...]:
        """Take in a step; returns the rows of this attempt that it advanced."""
        advanced = tuple(row for row in report.advanced if key_of(row.key) == self.key)
        failed = tuple(failure for failure in report.failed if key_of(failure.row.key) == self.key)
        if advanced or failed:
            self._began_s = report.began_s if self._began_s is None else self._began_s
            self._ended_s = report.ended_s
            self.compute_ms += (report.ended_s - report.began_s) * 1e3
        self.rows |= {row.key.index: row for row in advanced}
        self.errors |= {failure.row.key.index: failure.error for failure in failed}
        return advanced

    def fail(self, error: GiornataError) -> None:
        """End all unfinished rows with `error`."""
        self.errors |= dict.fromkeys(self.unfinished, error)

    def promised(self, row: Row) -> Row:
        """`row` with what an engine may have to know of its job."""
        job = self.request.job
        return replace(row, due_s=self.due_s, priority=job.priority)

    def progress(self, now_s: float) -> Iterator[RowProgress]:
        """Rows for the telemetry: the unfinished ones, or all while the report is being written."""
        listed = self.unfinished or self.indices
        due_ms = None if math.isinf(self.due_s) else (self.due_s - now_s) * 1e3
        for asked in self.request.rows:
            if asked.index not in listed:
                continue
            row = self.rows.get(asked.index)
            resumed = asked.resume.step if asked.resume else 0
            shape: dict[str, Any] = {"encoded": row is not None}
            if row is not None:
                first = row.shapes[0]
                shape |= {
                    "low_rank": first.low_rank,
                    "control": first.control,
                    "companion_tokens": row.companions,
                    "computed_tokens": row.computed_tokens if row.template or row.renewed_every else None,
                    "text_tokens": row.prompts[0].joint_tokens,
                    "padding_tokens": row.padding[0],
                    "prefix_tokens": max(row.prefix, default=0),
                    "sequences": len(row.prompts),
                    "begun": row.settled,
                    "renewed_every": row.renewed_every,
                    "skipped_steps": skipped_steps(row),
                    "degree": row.degree,
                }
            yield RowProgress(
                job_id=self.request.job.job_id,
                attempt=self.request.attempt,
                index=asked.index,
                step=row.step if row else resumed,
                steps=row.steps if row else self.request.job.denoising_steps,
                tokens=self.request.inspection.tokens,
                due_ms=due_ms,
                **shape,
            )


def has_room(attempts: Collection[Attempt], rows: int, capacity_rows: int) -> bool:
    """Whether so many more rows may come; an idle worker takes any job, since a large one would find no worker else."""
    unfinished = sum(len(attempt.unfinished) for attempt in attempts)
    return unfinished == 0 or unfinished + rows <= capacity_rows
