"""Attempts: what they count and carry, the tracks of their rows, and who takes an outcome."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from giornata.packed.packing import make_region
from giornata.scheduling.batch import Capacity
from giornata.wire.errors import InvalidField, RowPoisoned
from giornata.wire.jobs import (
    BlobRef,
    Encoding,
    Inspection,
    Job,
    JobRecord,
    JobState,
    Priority,
    RowRecord,
    RowState,
)
from giornata.wire.messages import Epoch, RunAnswer, RunRequest
from giornata.wire.models import Task
from giornata.wire.requests import EditParameters, Quality
from giornata_denoiser.attempts.attempt import (
    Attempt,
    AttemptInputs,
    AttemptResultWriter,
    AttemptRunner,
    EpochFence,
    Fetch,
    has_room,
)
from giornata_denoiser.attempts.inputs import track_of
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import FailedRow, StepReport
from giornata_denoiser.families.sampling import FlowMatching, shifted_by_size
from giornata_denoiser.rows.parts import Adapters, RowLora
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import SCHEDULER, Spec
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.fleet import CARD
from tests.present import present
from tests.unit.denoiser.engine.test_masked import OF

# Attempts count what is unfinished, and the record takes an outcome only from its present owner.


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
    row = tiny_flux.row(OF, Spec(steps=2))
    asked = request().model_copy(update={"denoise_within_ms": 1500.0})
    made = Attempt(asked, accepted_s=1.0)
    promised = made.promised(row).wishes
    assert (promised.due_s, promised.priority) == (2.5, Priority.BATCH)
    assert [each.due_ms for each in made.progress(2.75)] == [-250.0, -250.0]
    free = Attempt(request(), accepted_s=1.0)
    assert math.isinf(free.promised(row).wishes.due_s)
    assert [each.due_ms for each in free.progress(2.0)] == [None, None]


def test_an_attempt_follows_its_rows_and_no_others() -> None:
    first, second = (tiny_flux.row(OF, Spec(index=i, steps=2)) for i in range(2))
    stranger = tiny_flux.row(OF, Spec(attempt=2))
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
    resumed = RowRecord(index=1, seed=1, resume=RowState(step=2, latents=REF))
    made = Attempt(request(rows=(RowRecord(index=0, seed=0), resumed)), accepted_s=0.0)
    assert [(row.index, row.step, row.steps, row.tokens) for row in made.progress(0.0)] == [
        (0, 0, 4, 12),
        (1, 2, 4, 12),
    ]
    rows = [tiny_flux.row(OF, Spec(index=i)) for i in range(2)]
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
    built = tiny_flux.row(OF, Spec(text_tokens=6, padding_tokens=4))
    cells = torch.eye(3, 4).bool()
    made.rows = {0: changed(built, region=make_region(cells), renewed_every=3, keeps_padding=keeps)}
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
    changed = present(record.freed(1, "me", lambda row: {"latents": REF} if row.index < 2 else {}))
    assert [(row.latents, row.worker) for row in changed.rows] == [(REF, None), (None, "me"), (None, None)]


# The track of a row, and whom its refusal names.


TURBO: Any = SimpleNamespace(
    card=CARD.model_copy(update={"default_steps": 2}),
    family=SimpleNamespace(schedule=FlowMatching(SCHEDULER | {"shift_terminal": 0.02}, shifted_by_size)),
)


@pytest.mark.parametrize(
    ("quality", "steps", "strength", "field", "received"),
    [
        ("low", 1, 1.0, "quality", "low, which is 1 steps"),
        ("auto", 1, 1.0, "num_inference_steps", "1"),
        ("high", 1, 1.0, "num_inference_steps", "1"),
        ("low", 1, 1e-20, "quality", "low, which is 1 steps"),
        ("medium", 2, 1e-20, "strength", "1e-20"),
    ],
)
def test_a_quality_whose_steps_do_not_fit_is_named(
    quality: Quality, steps: int, strength: float, field: str, received: str
) -> None:
    parameters = EditParameters(prompt="x", quality=quality, num_inference_steps=steps, strength=strength)
    with pytest.raises(InvalidField) as refused:
        track_of(parameters, TURBO, Task.EDIT, 12)
    assert (refused.value.field, refused.value.received) == (field, received)
    if field == "quality":
        assert refused.value.accepted == "at least 2 steps, by another quality or num_inference_steps"


# A worker obeys the router that has taken the lease last.


def test_a_lower_epoch_is_refused_once_a_higher_one_was_heard_of() -> None:
    epochs = EpochFence()
    assert epochs.admits(Epoch(5, 7))
    assert epochs.admits(Epoch(5, 7))
    assert epochs.admits(Epoch(5, 9))
    assert not epochs.admits(Epoch(5, 7))
    assert not epochs.admits(Epoch(4, 100)), "of an earlier store"
    assert epochs.admits(None), "a router of an older version is obeyed"
    assert epochs.admits(Epoch(5, 9))


def test_in_a_store_that_was_made_anew_revisions_begin_again() -> None:
    epochs = EpochFence()
    assert epochs.admits(Epoch(5, 700))
    assert epochs.admits(Epoch(6, 1))
    assert not epochs.admits(Epoch(5, 701))


# What is written down of rows that an engine hands back: a state to go on from, unless it was never judged
# good.


class OneRecord:
    def __init__(self, record: JobRecord) -> None:
        self.record = record

    async def change(self, job_id: str, change: Callable[[JobRecord], JobRecord | None]) -> JobRecord:
        self.record = change(self.record) or self.record
        return self.record


async def test_a_row_that_is_not_finite_leaves_an_error_and_no_latents() -> None:
    held = tuple(RowRecord(index=index, seed=0, attempt=1, worker="worker") for index in range(2))
    records: Any = OneRecord(JobRecord(job=JOB, state=JobState.RUNNING, rows=held))
    attempt = Attempt(request(rows=held), 0.0)
    for index, value in enumerate((0.5, float("nan"))):
        row = tiny_flux.row(OF, Spec("job", index=index))
        attempt.rows[index] = replace(row, step=2, latent=torch.full_like(row.latent, value))
    written, _ = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    good, bad = written.rows
    assert present(good.resume).step == 2
    assert good.error is None
    assert (bad.resume, bad.latents) == (None, None)
    assert present(bad.error).code == "row_poisoned"


async def test_the_record_tells_the_step_from_which_loras_act() -> None:
    held = tuple(RowRecord(index=index, seed=0, attempt=1, worker="worker") for index in range(3))
    records: Any = OneRecord(JobRecord(job=JOB, state=JobState.RUNNING, rows=held))
    attempt = Attempt(request(rows=held), 0.0)
    under = Adapters((RowLora("a" * 64),), loras_from=3)
    for index, (step, adapters) in enumerate(((2, under), (4, under), (4, Adapters()))):
        row = tiny_flux.row(OF, Spec("job", index=index))
        attempt.rows[index] = replace(row, step=step, adapters=adapters)
    written, _ = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    under_way, done, without = written.rows
    assert present(under_way.resume).loras_from == 3
    assert (done.loras_from, without.loras_from) == (3, None)


async def test_latents_of_a_void_attempt_are_deleted() -> None:
    record = JobRecord(
        job=JOB, state=JobState.RUNNING, rows=(RowRecord(index=0, seed=0, attempt=2, worker="b"),)
    )
    records: Any = OneRecord(record)
    attempt = Attempt(request(rows=(RowRecord(index=0, seed=0, attempt=1, worker="worker"),)), 0.0)
    row = tiny_flux.row(OF, Spec("job", index=0))
    attempt.rows[0] = replace(row, step=row.steps)
    _, superseded = await AttemptResultWriter(MemoryBlobs(), records, "worker").write(attempt)
    assert len(superseded) == 1


# The carrier forgets an attempt however its task ends.


@asynccontextmanager
async def fetch_for_ever(request: RunRequest) -> AsyncIterator[AttemptInputs]:
    await asyncio.Event().wait()
    yield AttemptInputs((), asyncio.sleep(0), asyncio.get_running_loop().create_future())


@asynccontextmanager
async def refuse(request: RunRequest) -> AsyncIterator[AttemptInputs]:
    if request.rows:
        raise InvalidField("strength leaves no step to compute.", field="strength")
    yield AttemptInputs((), asyncio.sleep(0), asyncio.get_running_loop().create_future())


async def publish_nothing(*event: object) -> None:
    raise AssertionError("an attempt that was dropped is not told of")


class Outcomes:
    """Keeps attempts whose outcome is written; they are void by then."""

    def __init__(self) -> None:
        self.written: list[Attempt] = []

    async def write(self, attempt: Attempt) -> tuple[JobRecord, tuple[()]]:
        self.written.append(attempt)
        return JobRecord(job=attempt.request.job, state=JobState.CANCELLED), ()

    async def forget(self, latents: object) -> None:
        """Keeps none."""


def carrier(
    tasks: asyncio.TaskGroup, fetch: Fetch = fetch_for_ever, outcomes: Any = None, capacity_rows: int = 2
) -> AttemptRunner:
    engine = Engine(OF, Capacity(rows=2, tokens=1000), lambda: 0.0)
    return AttemptRunner(
        "worker",
        capacity_rows=capacity_rows,
        engine=EngineLoop(engine, lambda report: None, lambda error: None),
        fetch=fetch,
        outcomes=outcomes,
        publish=publish_nothing,
        tasks=tasks,
    )


async def test_a_cancel_that_overtakes_the_tasks_first_step_leaves_nothing_behind() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a")) is RunAnswer.ACCEPTED
        made.drop_job("a")  # nothing has been awaited since
    assert made.attempts == ()


async def test_a_newer_attempt_has_the_room_of_the_older_at_once() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks)
        assert made.take(request("a", attempt=1)) is RunAnswer.ACCEPTED
        assert made.take(request("b")) is RunAnswer.FULL
        assert made.take(request("a", attempt=2)) is RunAnswer.ACCEPTED
        await asyncio.sleep(0)  # the older task ends
        assert [attempt.key for attempt in made.attempts] == [("a", 2)]
        made.drop_job("a")
    assert made.attempts == ()


async def test_a_cancelled_job_leaves_with_every_attempt_and_no_other_job() -> None:
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks, capacity_rows=3)
        for job_id, attempt, index in (("a", 1, 0), ("a", 2, 1), ("b", 1, 0)):
            rows = (RowRecord(index=index, seed=0),)
            assert made.take(request(job_id, attempt, rows)) is RunAnswer.ACCEPTED
        assert [attempt.key for attempt in made.attempts] == [("a", 1), ("a", 2), ("b", 1)]
        made.drop_job("a")
        assert [attempt.key for attempt in made.attempts] == [("b", 1)]
        made.drop_job("b")


async def test_what_cannot_be_computed_is_answered_and_not_lost() -> None:
    outcomes = Outcomes()
    async with asyncio.TaskGroup() as tasks:
        made = carrier(tasks, refuse, outcomes)
        assert made.take(request("a")) is RunAnswer.ACCEPTED
    (attempt,) = outcomes.written
    assert [error.code for error in attempt.errors.values()] == ["invalid_field"] * 2
    assert made.attempts == ()
