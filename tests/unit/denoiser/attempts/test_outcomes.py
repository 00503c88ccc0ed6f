"""What is written down of rows that an engine hands back: a state to go on from, unless it was never judged good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from giornata.blobs.memory import MemoryBlobs
from giornata.wire.jobs import JobState
from giornata.wire.progress import JobRecord, RowRecord
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.attempts.outcomes import AttemptResultWriter
from giornata_denoiser.rows.adapters import Adapters, RowLora
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.attempts.test_attempt import JOB, request


class OneRecord:
    def __init__(self, record: JobRecord) -> None:
        self.record = record

    async def change(self, job_id: str, change: Callable[[JobRecord], JobRecord | None]) -> JobRecord:
        self.record = change(self.record) or self.record
        return self.record


async def test_a_row_that_is_not_finite_leaves_an_error_and_no_latents() -> None:
    held = tuple(RowRecord(index=index, seed=0, attempt=1, worker="worker") for index in range(2))
    records: Any = OneRecord(JobRecord(job=JOB, state=JobState.RUNNING, rows=held))
    attempt, of = Attempt(request(rows=held), 0.0), tiny_flux.family()
    for index, value in enumerate((0.5, float("nan"))):
        row = tiny_flux.row(of, Spec("job", index=index))
        attempt.rows[index] = replace(row, step=2, latent=torch.full_like(row.latent, value))
    written = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    good, bad = written.record.rows
    assert good.resume is not None
    assert good.resume.step == 2
    assert good.error is None
    assert (bad.resume, bad.latents) == (None, None)
    assert bad.error is not None
    assert bad.error.code == "row_poisoned"


async def test_the_record_tells_the_step_from_which_loras_act() -> None:
    held = tuple(RowRecord(index=index, seed=0, attempt=1, worker="worker") for index in range(3))
    records: Any = OneRecord(JobRecord(job=JOB, state=JobState.RUNNING, rows=held))
    attempt, of = Attempt(request(rows=held), 0.0), tiny_flux.family()
    under = Adapters((RowLora("a" * 64),), loras_from=3)
    for index, (step, adapters) in enumerate(((2, under), (4, under), (4, Adapters()))):
        row = tiny_flux.row(of, Spec("job", index=index))
        attempt.rows[index] = replace(row, step=step, adapters=adapters)
    written = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    under_way, done, without = written.record.rows
    assert under_way.resume is not None
    assert under_way.resume.loras_from == 3
    assert (done.loras_from, without.loras_from) == (3, None)


async def test_latents_of_a_void_attempt_are_deleted() -> None:
    record = JobRecord(
        job=JOB, state=JobState.RUNNING, rows=(RowRecord(index=0, seed=0, attempt=2, worker="b"),)
    )
    records: Any = OneRecord(record)
    attempt = Attempt(request(rows=(RowRecord(index=0, seed=0, attempt=1, worker="worker"),)), 0.0)
    row = tiny_flux.row(tiny_flux.family(), Spec("job", index=0))
    attempt.rows[0] = replace(row, step=row.steps)
    written = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    assert len(written.superseded) == 1
