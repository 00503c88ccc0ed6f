"""A job's record under every order of events, as its runner knows it; where time goes, and which blobs go last."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import low_rank_weights
from giornata.records import Change, RecordRevision
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.scheduling.demand import JobDemand
from giornata.wire.adapters import ControlUse, LoraUse
from giornata.wire.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    GiornataError,
    IntermediateLost,
    InternalError,
    JobCancelled,
)
from giornata.wire.jobs import Assignment, BlobRef, JobRecord, JobState, RowRecord, RowState
from giornata.wire.messages import StateEvent
from giornata.wire.requests import Reuse
from giornata.wire.values import ComputeTimes, Intermediate, StageTimes
from giornata_router import job_records
from giornata_router.job_records import UNWRITTEN_S, JobTimes, LiveJobRecord, StageTimer, leftovers
from tests.contract.messages import ENCODING, INSPECTION, JOB, REF
from tests.present import present

WHY = "the worker fell silent"
TIMES = JobTimes(StageTimes(prepare=1), ComputeTimes(inspect=1), spent_ms=5)
OTHER_INSPECTION = INSPECTION.model_copy(update={"compute_ms": INSPECTION.compute_ms + 1})
TWO = JOB.model_copy(update={"parameters": JOB.parameters.model_copy(update={"n": 2})})
Step = Callable[[JobRecord], JobRecord | None]


def latents(record: JobRecord) -> JobRecord:
    rows = tuple(row.model_copy(update={"latents": REF, "worker": None}) for row in record.rows)
    return record.model_copy(update={"rows": rows})


def assigned(record: JobRecord, worker: str, *rows: int) -> JobRecord:
    """The next attempt: `rows`, or all."""
    given = Assignment(record.attempt + 1, worker, rows or tuple(row.index for row in record.rows))
    return job_records.assigned(record, [given], INSPECTION, ENCODING, TIMES)


def lost(record: JobRecord, attempt: int, worker: str = "d1") -> JobRecord | None:
    return job_records.lost(record, Assignment(attempt, worker, ()), WHY)


def demand_of(record: JobRecord) -> JobDemand:
    return job_records.demand(record, INSPECTION, record.pending_rows, ENCODING)


def failed_rows(failures: int) -> tuple[RowRecord, ...]:
    return tuple(row.model_copy(update={"failures": failures}) for row in job_records.accepted(TWO).rows)


def finished(record: JobRecord) -> JobRecord:
    rows = tuple(row.model_copy(update={"image": REF}) for row in record.rows)
    return job_records.ended(record, rows, TIMES)


STEPS: dict[str, Step] = {
    "prepare": lambda r: job_records.entered(r, JobState.PREPARING, TIMES),
    "assign": lambda r: assigned(r, "d1"),
    "assign one": lambda r: assigned(r, "d1", 1),
    "lose": lambda r: lost(r, r.attempt),
    "lose an older one": lambda r: lost(r, r.attempt - 1),
    "take back": lambda r: job_records.taken_back(r, Assignment(r.attempt, "d1", ())),
    "denoise": latents,
    "end": finished,
    "fail": lambda r: job_records.closed(r, DeadlineExceeded(), TIMES),
    "cancel": lambda r: job_records.closed(r, JobCancelled(), TIMES),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_attempts_and_losses_only_grow_and_who_has_ended_has_no_owner(names: list[str]) -> None:
    record = job_records.accepted(TWO)
    for name in names:
        following = STEPS[name](record)
        if following is None:
            assert name in {"lose", "lose an older one", "take back"}
            continue
        free = [row for row in record.pending_rows if row.worker is None]
        given = name == "assign" or (name == "assign one" and any(row.index == 1 for row in free))
        assert following.attempt == record.attempt + (given and bool(free))
        assert len(following.causes) == len(record.causes) + name.startswith("lose")
        assert [row.seed for row in following.rows] == [7, 8]
        if name.startswith("lose"):
            assert record.assignments, "what nobody has cannot be lost"
        if following.state.terminal:
            assert not following.assignments
            assert (following.error is None) is (following.state is JobState.COMPLETED)
            break
        record = following


def test_an_older_attempt_cannot_be_lost_or_taken_back() -> None:
    first = assigned(job_records.accepted(JOB), "d1")
    free = present(job_records.taken_back(first, Assignment(1, "d1", (0,))))
    second = assigned(free, "d2")
    assert lost(second, 1) is None
    assert job_records.taken_back(second, Assignment(1, "d1", (0,))) is None


def test_attempts_side_by_side_are_lost_one_by_one() -> None:
    record = assigned(assigned(job_records.accepted(TWO), "d1", 0), "d2", 1)
    assert record.assignments == (Assignment(1, "d1", (0,)), Assignment(2, "d2", (1,)))
    after = present(lost(record, 1))
    assert after.assignments == (Assignment(2, "d2", (1,)),)
    assert [row.failures for row in after.rows] == [1, 0]


def test_a_row_that_somebody_has_or_that_is_done_is_not_given_again() -> None:
    record = assigned(job_records.accepted(TWO), "d1", 0)
    again = job_records.assigned(record, [Assignment(2, "d2", (0, 1))], INSPECTION, ENCODING, TIMES)
    assert again.assignments == (Assignment(1, "d1", (0,)), Assignment(2, "d2", (1,)))
    assert not assigned(latents(again), "d3").assignments


def test_one_picture_completes_a_job_and_none_fails_it_with_the_first_error() -> None:
    record = job_records.accepted(TWO)
    error = InternalError("no luck").body()
    broken = record.rows[0].model_copy(update={"error": error})
    whole = record.rows[1].model_copy(update={"image": REF})
    assert job_records.ended(record, (broken, whole), TIMES).state is JobState.COMPLETED
    failed = job_records.ended(record, (broken, record.rows[1]), TIMES)
    assert (failed.state, failed.error) == (JobState.FAILED, error)


def lost_of(lost: Intermediate) -> JobRecord:
    """A record of two rows with latents, whose second one has lost something."""
    record = latents(assigned(job_records.accepted(TWO), "d1"))
    error = IntermediateLost(field=lost).body()
    return record.model_copy(
        update={"rows": (record.rows[0], record.rows[1].model_copy(update={"error": error}))}
    )


def test_a_row_that_lost_its_latents_is_computed_again_and_the_others_are_not() -> None:
    record = lost_of(Intermediate.LATENTS)
    lost = job_records.lost_intermediates(record.rows)
    assert lost == {1: Intermediate.LATENTS}
    again = job_records.made_again(record, lost, None, TIMES)
    assert [row.latents for row in again.rows] == [REF, None]
    assert [row.index for row in again.pending_rows] == [1]
    assert (again.inspection, again.encoding, again.remade) == (INSPECTION, ENCODING, record.remade + 1)


def test_a_row_that_lost_something_else_keeps_its_latents() -> None:
    for lost in set(Intermediate) - {Intermediate.LATENTS}:
        record = lost_of(lost)
        again = job_records.made_again(record, {1: lost}, OTHER_INSPECTION, TIMES)
        assert [(row.latents, row.error) for row in again.rows] == [(REF, None)] * 2
        assert again.inspection == OTHER_INSPECTION
        assert again.encoding == (None if lost is Intermediate.ENCODING else ENCODING)


def test_a_demand_counts_only_what_is_still_to_be_computed() -> None:
    record = job_records.accepted(TWO)
    assert demand_of(record).steps == 8
    resumed = record.rows[0].model_copy(update={"resume": RowState(step=3, latents=REF)})
    done = record.rows[1].model_copy(update={"latents": REF})
    demand = demand_of(record.model_copy(update={"rows": (resumed, done)}))
    assert (demand.rows, demand.steps, demand.shapes[0].image) == (1, 1, INSPECTION.tokens)


@pytest.mark.parametrize("reuse", list(Reuse))
def test_a_demand_tells_the_prefix_of_every_edit_and_the_padding_of_those_that_may_take_it(
    reuse: Reuse,
) -> None:
    parameters = JOB.parameters.model_copy(update={"reuse": reuse})
    record = job_records.accepted(JOB.model_copy(update={"parameters": parameters}))
    told = {"text_tokens": 48, "padding_tokens": 40, "prefix_tokens": 7}
    encoding = ENCODING.model_copy(update=told)
    [shape] = job_records.demand(record, INSPECTION, record.pending_rows, encoding).shapes
    assert (shape.text, shape.padding, shape.prefix) == (48, 40 if reuse is Reuse.AUTO else 0, 7)


@pytest.mark.parametrize(("scale", "sequences"), [(None, 1), (3.0, 2)])
def test_a_demand_counts_the_unguided_half_of_a_guided_job(scale: float | None, sequences: int) -> None:
    record = job_records.accepted(JOB.model_copy(update={"cfg_scale": scale}))
    [shape] = job_records.demand(record, INSPECTION, record.pending_rows, ENCODING).shapes
    assert shape.sequences == sequences


def test_a_demand_counts_companions_where_everything_is_computed() -> None:
    record = job_records.accepted(JOB)
    seen = INSPECTION.model_copy(update={"companion_tokens": 12})
    demand = job_records.demand(record, seen, record.pending_rows, ENCODING)
    [shape] = demand.shapes
    assert (shape.image, shape.computed, shape.companions) == (24, 9, 12)
    whole = seen.model_copy(update={"compute_set": None})
    [shape] = job_records.demand(record, whole, record.pending_rows, ENCODING).shapes
    assert (shape.image, shape.computed) == (24, 24)


def test_a_demand_counts_the_compute_set_that_inspection_carries() -> None:
    record = job_records.accepted(JOB)

    def computed(**changed: object) -> int:
        seen = INSPECTION.model_copy(update=changed)
        [shape] = job_records.demand(record, seen, record.pending_rows, ENCODING).shapes
        return shape.computed

    assert computed() == 9, "of 12 tokens: the mask touches 4, and its halo is no square"
    assert computed(compute_set=None) == 12, "reuse gains nothing"
    off = JOB.model_copy(update={"parameters": JOB.parameters.model_copy(update={"reuse": Reuse.OFF})})
    record = job_records.accepted(off)
    assert computed() == 12


def test_losses_up_to_the_limit_are_borne_by_each_picture() -> None:
    rows = failed_rows(2)
    job_records.check_failures((*rows, *rows), (), 3)
    with pytest.raises(AttemptsExhausted, match="3 workers"):
        job_records.check_failures((*rows, *failed_rows(3)), (), 3)


def test_a_ledger_adds_to_what_others_have_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    record = job_records.accepted(JOB).model_copy(
        update={"stage_ms": StageTimes(prepare=10, queue=1), "spent_ms": 11}
    )
    sheet = StageTimer(record, waited_ms=500)
    with contextlib.suppress(ValueError), sheet.timing("prepare"):
        now += 0.25
        raise ValueError
    sheet.compute("inspect", 3)
    times = sheet.times()
    assert times.stage_ms == StageTimes(prepare=260, queue=501)
    assert times.compute_ms.inspect == 3
    assert times.spent_ms == 11 + 500 + 250, "what was waited is spent"


def test_rows_side_by_side_are_denoised_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sheet = StageTimer(job_records.accepted(TWO))
    with sheet.denoising():
        now += 0.5
        sheet.denoised(300.0)
        now += 0.25
        sheet.denoised(250.0)
    spent = sheet.times().stage_ms
    assert spent.queue == pytest.approx(200)
    assert spent.denoise == pytest.approx(550)
    with sheet.denoising():
        now += 0.125
    assert sheet.times().stage_ms.queue == pytest.approx(325)


@given(failures=st.integers(0, 4), limit=st.integers(1, 5))
def test_what_was_lost_stays_together_and_its_last_attempt_is_made_alone(failures: int, limit: int) -> None:
    record, rows = job_records.accepted(TWO), failed_rows(failures)
    demand = job_records.demand(record, INSPECTION, rows, ENCODING, max_failures=limit)
    assert demand.together == (failures > 0)
    assert demand.alone == (failures == limit - 1 and failures > 0)


def test_adapters_that_act_are_part_of_what_a_job_asks_for() -> None:
    loras = (
        LoraUse(lora_id="1", sha256="a", size_bytes=600, rank=4, modules=3),
        LoraUse(lora_id="2", sha256="b", size_bytes=400, rank=4, modules=3, scale=0.0),
        LoraUse(lora_id="3", sha256="c", size_bytes=200, rank=4, modules=0, text_modules=3),
    )
    nets = (
        ControlUse(model="edges", digest="e", start=0.25, end=0.75),
        ControlUse(model="depth", digest="d", scale=0.0),
    )
    job = JOB.model_copy(update={"loras": loras, "controls": nets})
    demand = demand_of(job_records.accepted(job))
    assert demand.adapters == (NeededLora("a", 600),), "one has no scale, one changes text encoders alone"
    assert (demand.joins_within, demand.needing) == (0.0, 1.0)
    late = [lora.model_copy(update={"joins_within": 0.25}) for lora in loras[:1]]
    told = job.model_copy(update={"loras": (*late, *loras[1:])})
    assert demand_of(job_records.accepted(told)).joins_within == 0.25
    assert demand.controls == (NeededControl("e", 0.5),)
    (shape,) = demand.shapes
    assert (shape.low_rank, shape.sequences * shape.segments) == (low_rank_weights(0, 600), 1)
    counted = job.model_copy(update={"loras": (loras[0].model_copy(update={"weights": 150}), loras[0])})
    (shape,) = demand_of(job_records.accepted(counted)).shapes
    assert shape.low_rank == 150 + 300, "one of 32 bits, and one that was not counted"
    assert demand_of(job_records.accepted(JOB)).shapes[0].segments == 0


def test_whoever_loses_too_many_attempts_is_told_how() -> None:
    record = job_records.accepted(JOB)
    for worker in ("d1", "d2"):
        record = assigned(record, worker)
        after = present(lost(record, record.attempt, worker))
        record = after
    job_records.check_failures(record.rows, record.causes, 3)
    with pytest.raises(AttemptsExhausted) as caught:
        job_records.check_failures(record.rows, record.causes, 2)
    assert caught.value.received == f"attempt 1 on d1: {WHY}; attempt 2 on d2: {WHY}"


KNOWN = RecordRevision(job_records.accepted(JOB), 1)


class SwallowingRecords:
    """Answers once asked to stop, as Python 3.11's wait_for does where both come at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read(self, job_id: str) -> RecordRevision[JobRecord]:
        assert job_id == JOB.job_id
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return KNOWN

    async def revise(
        self, job_id: str, _: Change[JobRecord], known: RecordRevision[JobRecord]
    ) -> RecordRevision[JobRecord]:
        assert known is KNOWN
        return await self.read(job_id)


@pytest.mark.parametrize(
    "work", [lambda p: p.reread(), lambda p: p.change(lambda record: record)], ids=["reread", "change"]
)
async def test_whoever_was_cancelled_while_the_record_came_does_not_go_on(
    work: Callable[[LiveJobRecord], Awaitable[JobRecord]],
) -> None:
    records = SwallowingRecords()
    progress = LiveJobRecord(None, records, KNOWN)  # type: ignore[arg-type]  # nothing is told, and a fake
    task = asyncio.ensure_future(work(progress))
    await records.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class KeptRecords:
    """One record in memory, and how often it was read."""

    def __init__(self) -> None:
        self.kept, self.reads = KNOWN, 0

    async def read(self, _: str) -> RecordRevision[JobRecord]:
        self.reads += 1
        return self.kept

    async def revise(
        self, _: str, change: Change[JobRecord], known: RecordRevision[JobRecord]
    ) -> RecordRevision[JobRecord]:
        if known.revision != self.kept.revision:
            known = await self.read("")
        following = change(known.record)
        if following is not None and following != known.record:
            self.kept = RecordRevision(following, known.revision + 1)
        return self.kept


class FakeStateBus:
    """A bus that keeps the states it is to tell."""

    def __init__(self) -> None:
        self.states: list[JobState] = []

    async def publish(self, _: str, event: StateEvent) -> None:
        self.states.append(event.state)


def state_in(records: KeptRecords) -> JobState:
    return records.kept.record.state


def cancelling(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"cancel": True})


def failing(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"causes": (*record.causes, "lost")})


async def test_a_state_is_told_at_once_and_written_with_the_next_change() -> None:
    bus, records = FakeStateBus(), KeptRecords()
    live = LiveJobRecord(bus, records, KNOWN)  # type: ignore[arg-type]  # fakes
    await live.enter(JobState.PREPARING)
    assert (bus.states, records.kept) == ([JobState.PREPARING], KNOWN)
    await live.change(failing)
    await live.change(lambda record: record.model_copy(update={"state": JobState.RUNNING}))
    states = [state_in(records)]
    await live.enter(JobState.FINISHING)
    await live.change(failing)
    states.append(state_in(records))
    await live.change(lambda record: record.model_copy(update={"state": JobState.RUNNING}))
    await live.change(failing)
    states.append(state_in(records))
    assert states == [JobState.RUNNING, JobState.FINISHING, JobState.RUNNING], "a state is written once"
    assert (records.kept.revision, records.reads) == (6, 0)


async def test_a_state_that_lasts_is_written_by_itself_and_once() -> None:
    records = KeptRecords()
    live = LiveJobRecord(FakeStateBus(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    before = time.monotonic()
    await live.enter(JobState.PREPARING)
    now = time.monotonic()
    assert not live.unwritten(before + UNWRITTEN_S / 2)
    assert live.unwritten(now + UNWRITTEN_S)
    await live.write_state()
    assert records.kept.record.state is JobState.PREPARING
    assert not live.unwritten(now + UNWRITTEN_S)
    await live.write_state()
    assert records.kept.revision == 2


async def test_a_cancel_that_another_wrote_is_met_at_the_next_change() -> None:
    records = KeptRecords()
    live = LiveJobRecord(FakeStateBus(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    records.kept = RecordRevision(cancelling(KNOWN.record), 2)
    with pytest.raises(JobCancelled):
        await live.change(failing)


async def test_an_older_revision_that_arrives_later_is_not_the_latest() -> None:
    records = KeptRecords()
    live = LiveJobRecord(FakeStateBus(), records, KNOWN)  # type: ignore[arg-type]  # fakes
    await live.change(failing)
    records.kept = KNOWN
    assert (await live.reread()).causes == ("lost",)


def ref(key: str) -> BlobRef:
    return BlobRef(key=key, size_bytes=1, sha256="")


def own(name: str) -> BlobRef:
    return ref(f"{JOB.job_id}/{name}")


def record(image: str, error: GiornataError | None = None) -> JobRecord:
    uploads = [ref(f"{JOB.upload_folder}x/{name}") for name in ("mask", "reference_0", "control_image_0")]
    job = JOB.model_copy(
        update={
            "image": ref(image),
            "mask": uploads[0],
            "references": (uploads[1],),
            "control_images": (uploads[2],),
        }
    )
    made = JobRecord(job=job, state=JobState.FAILED, error=error.body() if error else None)
    return made.model_copy(
        update={
            "inspection": INSPECTION.model_copy(
                update={
                    "prepared": own("prepared"),
                    "alpha": own("alpha"),
                    "references": own("seen"),
                    "controls": own("annotated"),
                }
            ),
            "encoding": ENCODING.model_copy(
                update={
                    "text": own("text"),
                    "rows": (own("row"),),
                    "references": own("clean"),
                    "controls": (own("control"),),
                    "empty_text": ref("shared/p/empty-text"),
                }
            ),
        }
    )


def keys(found: JobRecord, *made: BlobRef) -> set[str]:
    return {ref.key for ref in leftovers(found, made)}


STAGES = {
    own(name).key for name in ("prepared", "alpha", "seen", "annotated", "text", "clean", "control", "row")
}
MASK = f"{JOB.upload_folder}x/mask"
OTHERS = {f"{JOB.upload_folder}x/reference_0", f"{JOB.upload_folder}x/control_image_0"}


def test_the_jobs_own_pictures_go_and_those_of_others_stay() -> None:
    mine = f"{JOB.upload_folder}x/image"
    assert keys(record(mine)) == STAGES | {mine, MASK} | OTHERS
    for shared in (f"{JOB.tenant}/template_1/image", f"{JOB.tenant}/upload_1/image", f"{JOB.tenant}/image"):
        assert keys(record(shared)) == STAGES | {MASK} | OTHERS


def test_a_job_in_quarantine_keeps_its_inputs_for_an_operator() -> None:
    assert keys(record(f"{JOB.upload_folder}x/image", AttemptsExhausted())) == STAGES
    assert MASK in keys(record(f"{JOB.upload_folder}x/image", InternalError()))


@pytest.mark.parametrize("delivered", [True, False])
def test_a_picture_goes_unless_it_is_delivered(delivered: bool) -> None:
    image = own("image-0-a")
    rows = (
        RowRecord(index=0, seed=1, image=image if delivered else None, latents=own("latents-0-b")),
        RowRecord(index=1, seed=2, resume=RowState(step=1, latents=own("latents-1-c"))),
    )
    found = keys(record("").model_copy(update={"rows": rows}), image)
    assert found == STAGES | {MASK, own("latents-0-b").key, own("latents-1-c").key} | OTHERS | (
        set() if delivered else {image.key}
    )
