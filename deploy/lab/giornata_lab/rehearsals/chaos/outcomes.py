"""What became of an edit, as its client saw it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from giornata.wire.jobs import JobState
from giornata_lab.rehearsals.chaos.edits import ChaosEdit


@dataclass(frozen=True)
class OutcomeRecord:
    """A job's record when it was looked at."""

    revision: int
    state: JobState
    code: str | None
    """Code of the error that ended the job."""
    attempt: int
    pictures: int
    causes: tuple[str, ...] = ()


@dataclass
class Outcome:
    """Grows while the client works."""

    edit: ChaosEdit
    accepted: bool = False
    tries: int = 0
    """Submissions, the accepted one included."""
    again: Counter[str] = field(default_factory=Counter)
    """Why something was asked for again, by code or kind of error."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that no fault excuses."""
    job_ids: set[str] = field(default_factory=set)
    """That the doors have told."""
    record: OutcomeRecord | None = None
    """When the client knew of the end."""
    pictures: list[bytes] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What is wrong with its pictures."""
    ends: list[str] = field(default_factory=list)
    """Final events of the stream that told the end, by type; only REST."""
    latency_s: float = 0.0
    """From the first submission until the pictures were there."""
    gave_up: str | None = None
    """What its client was still waiting for at its limit."""

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.edit.number,
            "job": self.edit.job_id,
            "door": self.edit.door,
            "state": self.record.state if self.record else None,
            "code": self.record.code if self.record else None,
            "attempt": self.record.attempt if self.record else None,
            "tries": self.tries,
            "again": dict(self.again),
            "latency_s": round(self.latency_s, 3),
        }
