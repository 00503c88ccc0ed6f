"""The attempts at jobs that this worker has accepted, from the acceptance to the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from giornata.scheduling.batch import RowKey
from giornata.wire.errors import GiornataError
from giornata.wire.messages import RunRequest
from giornata.wire.workers import RowProgress
from giornata_denoiser.engine.engine import StepReport
from giornata_denoiser.rows.row import Row

AssignmentKey = tuple[str, int]
"""Job id and attempt."""


class Assignment:
    """The rows of one attempt, and how far they are."""

    def __init__(self, request: RunRequest, accepted_s: float) -> None:
        self.request = request
        self.rows: dict[int, Row] = {}
        """By index, as of their last step; empty until their inputs are there."""
        self.errors: dict[int, GiornataError] = {}
        """By index: rows that failed."""
        self.compute_ms = 0.0
        """Sum of the steps that the rows took part in."""
        self._accepted_s = accepted_s
        self._began_s: float | None = None
        self._ended_s = accepted_s

    @property
    def key(self) -> AssignmentKey:
        """Job id and attempt."""
        return self.request.job.job_id, self.request.attempt

    @property
    def indices(self) -> frozenset[int]:
        """Of all its rows."""
        return frozenset(row.index for row in self.request.rows)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the rows that have neither a final latent nor an error."""
        return tuple(
            row.index
            for row in self.request.rows
            if row.index not in self.errors and not (row.index in self.rows and self.rows[row.index].done)
        )

    @property
    def wait_ms(self) -> float:
        """From acceptance to the first step."""
        return 0.0 if self._began_s is None else (self._began_s - self._accepted_s) * 1e3

    @property
    def denoise_ms(self) -> float:
        """From the first row's first step to the last row's last."""
        return 0.0 if self._began_s is None else (self._ended_s - self._began_s) * 1e3

    def start(self, rows: Iterable[Row]) -> None:
        """The inputs are there: `rows` go to the engine."""
        self.rows = {row.key.index: row for row in rows}

    def advance(self, report: StepReport) -> tuple[Row, ...]:
        """Take in a step; returns those of its rows that belong here."""
        advanced = tuple(row for row in report.advanced if self._has(row.key))
        failed = tuple(failure for failure in report.failed if self._has(failure.row.key))
        if advanced or failed:
            self._began_s = report.began_s if self._began_s is None else self._began_s
            self._ended_s = report.ended_s
            self.compute_ms += (report.ended_s - report.began_s) * 1e3
        self.rows |= {row.key.index: row for row in advanced}
        self.errors |= {failure.row.key.index: failure.error for failure in failed}
        return advanced

    def fail(self, error: GiornataError) -> None:
        """Nothing of what is unfinished can be computed."""
        self.errors |= dict.fromkeys(self.unfinished, error)

    def progress(self) -> Iterator[RowProgress]:
        """Rows for the telemetry: the unfinished ones, or all while the report is being written."""
        listed = self.unfinished or tuple(row.index for row in self.request.rows)
        for asked in self.request.rows:
            if asked.index not in listed:
                continue
            row = self.rows.get(asked.index)
            resumed = asked.resume.step if asked.resume else 0
            yield RowProgress(
                job_id=self.request.job.job_id,
                attempt=self.request.attempt,
                index=asked.index,
                step=row.step if row else resumed,
                steps=row.steps if row else self.request.job.parameters.denoising_steps,
                tokens=self.request.inspection.tokens,
                **(_shape(row) if row else {}),
            )

    def _has(self, key: RowKey) -> bool:
        return (key.job_id, key.attempt) == self.key


def _shape(row: Row) -> dict[str, Any]:
    """What telemetry tells of a row whose inputs are here."""
    return {
        "computed_tokens": None if row.template is None else row.computed_tokens,
        "text_tokens": len(row.prompt.embeds),
        "sequences": len(row.prompts),
        "begun": row.begun,
    }


class Assignments:
    """All of them, by job and attempt."""

    def __init__(self, capacity_rows: int) -> None:
        self._capacity_rows = capacity_rows
        self._by_key: dict[AssignmentKey, Assignment] = {}

    def __iter__(self) -> Iterator[Assignment]:
        return iter(tuple(self._by_key.values()))

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def get(self, key: RowKey) -> Assignment | None:
        """The assignment that a row belongs to."""
        return self._by_key.get((key.job_id, key.attempt))

    def has_room(self, rows: int) -> bool:
        """Whether so many more rows may come; an idle worker takes any job, since otherwise nobody could."""
        unfinished = sum(len(assignment.unfinished) for assignment in self)
        return unfinished == 0 or unfinished + rows <= self._capacity_rows

    def add(self, assignment: Assignment) -> None:
        """From its acceptance."""
        self._by_key[assignment.key] = assignment

    def remove(self, assignment: Assignment) -> bool:
        """Once it is reported, or void; False if it is no longer here."""
        if self._by_key.get(assignment.key) is not assignment:
            return False
        del self._by_key[assignment.key]
        return True

    def of_job(self, job_id: str) -> tuple[Assignment, ...]:
        """Every attempt at a job that is here."""
        return tuple(assignment for assignment in self if assignment.request.job.job_id == job_id)
