"""Attempts count what is unfinished, and the record takes an outcome only from its present owner."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from giornata.packed.region import region
from giornata.wire.errors import RowPoisoned
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobState, Priority
from giornata.wire.messages import RunRequest
from giornata.wire.progress import JobRecord, RowRecord, RowState
from giornata.wire.requests import EditParameters
from giornata_denoiser.attempts.attempt import Attempt, has_room
from giornata_denoiser.engine.protocol import FailedRow, StepReport
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec

REF = BlobRef(key="k", size_bytes=1, sha256="s")
JOB = Job(
    job_id="job",
    tenant="t",
    gateway="g",
    priority=Priority.BATCH,
    model="m",
    model_digest="d",
    parameters=EditParameters(prompt="a hat", n=2, num_inference_steps=4, strength=1.0),
    image=REF,
    budget_ms=1000,
    result_ttl_s=60,
)
INSPECTION = Inspection(
    width=64,
    height=48,
    has_alpha=False,
    model_width=64,
    model_height=48,
    output_width=64,
    output_height=48,
    tokens=12,
    compute_tokens=6,
    mask_ratio=0.5,
    template_key="t",
    prepared=REF,
)


def request(job_id: str = "job", attempt: int = 1, rows: tuple[RowRecord, ...] | None = None) -> RunRequest:
    return RunRequest(
        job=JOB.model_copy(update={"job_id": job_id}),
        attempt=attempt,
        inspection=INSPECTION,
        encoding=Encoding(text=REF, text_tokens=5, rows=(REF, REF)),
        rows=rows or (RowRecord(index=0, seed=0), RowRecord(index=1, seed=1)),
        remaining_ms=1000,
    )


def test_rows_and_telemetry_are_told_when_the_last_step_is_to_end() -> None:
    row = tiny_flux.row(tiny_flux.family(), Spec(steps=2))
    asked = request().model_copy(update={"denoise_within_ms": 1500.0})
    made = Attempt(asked, accepted_s=1.0)
    promised = made.promised(row)
    assert (promised.due_s, promised.priority) == (2.5, Priority.BATCH)
    assert [each.due_ms for each in made.progress(2.75)] == [-250.0, -250.0]
    free = Attempt(request(), accepted_s=1.0)
    assert math.isinf(free.promised(row).due_s)
    assert [each.due_ms for each in free.progress(2.0)] == [None, None]


def test_an_attempt_follows_its_rows_and_no_others() -> None:
    of = tiny_flux.family()
    first, second = (tiny_flux.row(of, Spec(index=i, steps=2)) for i in range(2))
    stranger = tiny_flux.row(of, Spec(attempt=2))
    made = Attempt(request(), accepted_s=1.0)
    made.rows = {0: first, 1: second}
    assert list(made.unfinished) == [0, 1]
    assert made.advance(StepReport(1.5, 1.9, advanced=(stranger,))) == ()
    assert made.wait_ms == 0
    one = first.advanced(first.latent)
    assert made.advance(
        StepReport(2.0, 2.5, advanced=(one,), failed=(FailedRow(second, RowPoisoned()),))
    ) == (one,)
    assert list(made.unfinished) == [0]
    made.advance(StepReport(3.0, 3.25, advanced=(one.advanced(one.latent),)))
    assert list(made.unfinished) == []
    assert (made.wait_ms, made.denoise_ms, made.compute_ms) == (1000, 1250, 750)


def test_progress_lists_the_unfinished_and_all_while_the_report_is_written() -> None:
    of = tiny_flux.family()
    resumed = RowRecord(index=1, seed=1, resume=RowState(step=2, latents=REF))
    made = Attempt(request(rows=(RowRecord(index=0, seed=0), resumed)), accepted_s=0.0)
    assert [(row.index, row.step, row.steps, row.tokens) for row in made.progress(0.0)] == [
        (0, 0, 4, 12),
        (1, 2, 4, 12),
    ]
    rows = [tiny_flux.row(of, Spec(index=i)) for i in range(2)]
    made.rows = dict(enumerate(rows))
    done = replace(rows[0], step=4)
    made.advance(StepReport(0.0, 1.0, advanced=(done,)))
    assert [row.index for row in made.progress(0.0)] == [1]
    made.fail(RowPoisoned())
    assert [(row.index, row.step) for row in made.progress(0.0)] == [(0, 4), (1, 0)]


@pytest.mark.parametrize("keeps", [False, True])
def test_telemetry_tells_the_padding_that_a_row_keeps(keeps: bool) -> None:
    made = Attempt(request(rows=(RowRecord(index=0, seed=0),)), accepted_s=0.0)
    assert not next(made.progress(0.0)).shape_known
    built = tiny_flux.row(tiny_flux.family(), Spec(text_tokens=6, padding_tokens=4))
    cells = torch.eye(3, 4).bool()
    made.rows = {0: replace(built, region=region(cells), renewed_every=3, keeps_padding=keeps)}
    (told,) = made.progress(0.0)
    assert (told.text_tokens, told.padding_tokens) == (6, 4 if keeps else 0)
    assert told.shape_known


def test_room_counts_unfinished_rows_and_an_idle_worker_takes_any_job() -> None:
    assert has_room([], 9, capacity_rows=3)
    first = Attempt(request(), accepted_s=0.0)
    assert has_room([first], 1, capacity_rows=3)
    assert not has_room([first], 2, capacity_rows=3)
    first.fail(RowPoisoned())
    assert has_room([first], 9, capacity_rows=3)


@pytest.mark.parametrize(("attempt", "worker"), [(2, "me"), (1, "another"), (1, None)])
def test_an_outcome_of_a_void_attempt_changes_nothing(attempt: int, worker: str | None) -> None:
    rows = (RowRecord(index=0, seed=0, attempt=attempt, worker=worker),)
    record = JobRecord(job=JOB, state=JobState.RUNNING, attempt=attempt, rows=rows)
    assert record.freed(1, "me", lambda _: {"latents": REF}) is None


def test_an_outcome_changes_and_frees_the_rows_of_its_attempt_alone() -> None:
    rows = (
        RowRecord(index=0, seed=0, attempt=1, worker="me"),
        RowRecord(index=1, seed=1, attempt=2, worker="me"),
        RowRecord(index=2, seed=2, attempt=1, worker="me"),
    )
    record = JobRecord(job=JOB, state=JobState.RUNNING, attempt=2, rows=rows)
    changed = record.freed(1, "me", lambda row: {"latents": REF} if row.index < 2 else {})
    assert changed is not None
    assert [(row.latents, row.worker) for row in changed.rows] == [(REF, None), (None, "me"), (None, None)]
