"""A job's record: the pure functions that change it, and one job's record as its runner knows it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import nats.errors
import structlog

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel
from giornata.planning.operations import low_rank_weights
from giornata.records import Change, JobRecordStore, RecordRevision
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.wire import subjects
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import (
    AttemptsExhausted,
    GiornataError,
    IntermediateLost,
    InternalError,
    JobCancelled,
)
from giornata.wire.jobs import (
    Assignment,
    BlobRef,
    Encoding,
    Inspection,
    Job,
    JobRecord,
    JobState,
    RowRecord,
    picture_id,
)
from giornata.wire.messages import DoneEvent, EventKind, StateEvent
from giornata.wire.requests import Reuse, extrapolated_steps
from giornata.wire.resolution import guided_by
from giornata.wire.values import ComputeTimes, Intermediate, StageTimes
from giornata_router.leadership import LeaseEndedError

log = structlog.get_logger(__name__)

MOST_CAUSES: Final = 20
"""Lost attempts that a record tells of, the last ones."""
_NAMES: Final = frozenset(map(str, Intermediate))


class JobTimes(NamedTuple):
    """The time that each stage of a job took so far: the record's fields of the same names."""

    stage_ms: StageTimes
    compute_ms: ComputeTimes
    spent_ms: int


def accepted(job: Job) -> JobRecord:
    """The first revision: queued, with a row for each picture, or for each region of one."""
    rows = tuple(RowRecord(index=i, seed=seed) for i, seed in enumerate(job.seeds))
    return JobRecord(job=job, rows=rows)


def entered(record: JobRecord, state: JobState, times: JobTimes) -> JobRecord:
    """The job is now in a state that is not terminal."""
    return record.model_copy(update={"state": state, **_timed(record, times)})


def assigned(
    record: JobRecord,
    assignments: Iterable[Assignment],
    inspection: Inspection,
    encoding: Encoding,
    times: JobTimes,
) -> JobRecord:
    """Rows belong to workers; reports of earlier attempts at them are void from here on.

    Rows that have a worker, or need none any more, stay as they are: another router may have been faster.
    """
    free = {row.index for row in record.pending_rows if row.worker is None}
    given = {index: found for found in assignments for index in found.rows if index in free}
    rows = tuple(
        row.model_copy(update={"attempt": given[row.index].attempt, "worker": given[row.index].worker})
        if row.index in given
        else row
        for row in record.rows
    )
    return record.model_copy(
        update={
            "state": JobState.RUNNING,
            "attempt": max(record.attempt, *(row.attempt for row in rows)),
            "rows": rows,
            "inspection": inspection,
            "encoding": encoding,
            **_timed(record, times),
        }
    )


def lost(
    record: JobRecord, assignment: Assignment, why: str, *, at_most: int | None = None
) -> JobRecord | None:
    """The worker of an attempt is gone; None if no row belongs to the attempt any more.

    A row has at most `at_most` failures afterwards, or as many as it had.
    """
    attempt, worker, _ = assignment

    def failed(row: RowRecord) -> dict[str, object]:
        failures = row.failures + 1
        return {"failures": failures if at_most is None else max(row.failures, min(failures, at_most))}

    freed = record.freed(attempt, worker, failed)
    causes = (*record.causes, f"attempt {attempt} on {worker}: {why}")[-MOST_CAUSES:]
    return freed and freed.model_copy(update={"causes": causes})


def taken_back(record: JobRecord, assignment: Assignment) -> JobRecord | None:
    """The rows of an attempt were handed back or refused, which is no failure; None as in :func:`lost`."""
    return record.freed(assignment.attempt, assignment.worker, lambda _: {})


def lost_intermediates(rows: Iterable[RowRecord]) -> dict[int, Intermediate]:
    """Return what is lost of each row that cannot go on without it, by the row's index."""
    return {
        row.index: Intermediate(row.error.field)
        for row in rows
        if row.error is not None and row.error.code == IntermediateLost.code and row.error.field in _NAMES
    }


def made_again(
    record: JobRecord, lost: Mapping[int, Intermediate], inspection: Inspection | None, times: JobTimes
) -> JobRecord:
    """The rows that lost something go back to the stage that makes it; `inspection` takes the place of the old one."""

    def again(row: RowRecord) -> RowRecord:
        if row.index not in lost:
            return row
        if lost[row.index] is not Intermediate.LATENTS:
            return row.model_copy(update={"error": None})
        return row.model_copy(update={"error": None, "latents": None})

    return record.model_copy(
        update={
            "rows": tuple(map(again, record.rows)),
            "inspection": inspection or record.inspection,
            "encoding": None if Intermediate.ENCODING in lost.values() else record.encoding,
            "remade": record.remade + 1,
            **times._asdict(),
        }
    )


def ended(record: JobRecord, rows: tuple[RowRecord, ...], times: JobTimes) -> JobRecord:
    """Every row has a picture or an error: completed if there is at least one picture, else failed."""
    told = {row.index: {"image": row.image, "error": row.error} for row in rows}
    written = [row.model_copy(update=told[row.index]) for row in record.rows]
    fields = _lean(record, written) | _timed(record, times)
    if any(row.image for row in rows):
        return record.model_copy(update={"state": JobState.COMPLETED, "error": None, **fields})
    errors = [row.error for row in rows if row.error]
    error = errors[0] if errors else InternalError("The job ended without a picture.").body()
    return record.model_copy(update={"state": JobState.FAILED, "error": error, **fields})


def closed(record: JobRecord, error: GiornataError, times: JobTimes) -> JobRecord:
    """The job as a whole failed, or was cancelled."""
    state = JobState.CANCELLED if isinstance(error, JobCancelled) else JobState.FAILED
    fields = {"state": state, "error": error.body(), **_lean(record, record.rows), **_timed(record, times)}
    return record.model_copy(update=fields)


def check_failures(rows: Sequence[RowRecord], causes: Sequence[str], limit: int) -> None:
    """Raise AttemptsExhausted if one of a job's `rows` has lost too many attempts."""
    failures = max(row.failures for row in rows)
    if failures >= limit:
        message = f"{failures} workers were lost while computing this edit."
        raise AttemptsExhausted(message, received="; ".join(causes))


def demand(
    record: JobRecord,
    inspection: Inspection,
    rows: Sequence[RowRecord],
    encoding: Encoding | None,
    *,
    max_failures: int = 0,
) -> JobDemand:
    """Return what `rows` ask of workers.

    Rows that were lost with their worker go to one worker together: if they brought it down, they bring down no more
    than one at a time. Rows with one attempt left make it on an empty worker, since other rows may have brought down
    the workers that they shared: so they fail alone or are found innocent.
    """
    job, asked = record.job, record.job.parameters
    failures = max((row.failures for row in rows), default=0)
    template = picture_id(job.tenant, inspection.template_key) if asked.reuse is not Reuse.OFF else None
    return JobDemand(
        job.model,
        job.model_digest,
        tuple(_shape(job, inspection, encoding, row) for row in rows),
        template=template,
        renews=asked.reuse is Reuse.AUTO,
        together=failures > 0,
        alone=0 < failures == max_failures - 1,
        adapters=tuple(NeededLora(lora.sha256, lora.size_bytes) for lora in _acting(job)),
        joins_within=min((lora.joins_within for lora in _acting(job)), default=0.0),
        controls=tuple(NeededControl(net.digest, net.end - net.start) for net in job.controls if net.scale),
    )


def _shape(job: Job, inspection: Inspection, encoding: Encoding | None, row: RowRecord) -> RowShape:
    """Return what a row asks for; text counts once it is encoded."""
    reuse, sequences, loras = job.parameters.reuse, 1 if guided_by(job) is None else 2, _acting(job)
    # at a grain of 1, cells are tokens
    region = inspection.compute_set[1] if reuse is not Reuse.OFF and inspection.compute_set else None
    image = inspection.tokens + inspection.companion_tokens
    steps = max(1, job.denoising_steps - (row.resume.step if row.resume else 0))
    return RowShape(
        text=encoding.text_tokens if encoding else 0,
        padding=encoding.padding_tokens if encoding and reuse is Reuse.AUTO else 0,
        prefix=encoding.prefix_tokens if encoding else 0,
        image=image,
        computed=region.count if region else image,
        steps=steps,
        skipped=extrapolated_steps(job.parameters, steps),
        sequences=sequences,
        companions=inspection.companion_tokens,
        low_rank=sum(low_rank_weights(lora.weights, lora.size_bytes) for lora in loras),
        segments=1 / sequences if loras else 0.0,
    )


def _acting(job: Job) -> tuple[LoraUse, ...]:
    """The job's LoRAs that change the denoising network; prepost applies what changes text encoders."""
    return tuple(lora for lora in job.loras if lora.modules and lora.scale)


def _lean(record: JobRecord, rows: Sequence[RowRecord]) -> dict[str, object]:
    """Fields of an ended job's record without what only an unfinished job needs: workers, bitmaps, claim checks.

    A running job's end is then smaller than the revision before it, which a single full NATS server takes.
    """
    spent: dict[str, object] = {"worker": None, "resume": None}
    kept = tuple(row.model_copy(update=spent | ({"latents": None} if row.image else {})) for row in rows)
    found, made = record.inspection, record.encoding
    return {
        "rows": kept,
        "inspection": found
        and found.model_copy(update={"compute_set": None, "alpha": None, "references": None}),
        "encoding": made and made.model_copy(update={"rows": (), "references": None, "empty_text": None}),
    }


def _timed(record: JobRecord, times: JobTimes) -> dict[str, object]:
    """The fields of a record that say where its job's time went."""
    return {
        "stage_ms": record.stage_ms.updated(times.stage_ms),
        "compute_ms": record.compute_ms.updated(times.compute_ms),
        "spent_ms": times.spent_ms,
    }


def leftovers(record: JobRecord, made: Iterable[BlobRef]) -> tuple[BlobRef, ...]:
    """Return what is to be deleted of a job with a terminal `record`; `made` is what its stages made besides.

    A blob is the job's own if its key lies in one of the job's folders. Template pictures, uploads of applications and
    the empty prompt lie elsewhere. Delivered pictures stay, and the inputs of a job in quarantine.
    """
    job = record.job
    delivered = {row.image.key for row in record.rows if row.image is not None}
    found = [ref for ref in (*of_record(record), *made) if ref.key.startswith(f"{job.job_id}/")]
    if record.error is None or record.error.code != AttemptsExhausted.code:
        found += [ref for ref in job.pictures if ref.key.startswith(job.upload_folder)]
    by_key = {ref.key: ref for ref in found if ref.key not in delivered}
    return tuple(by_key.values())


def of_inspection(inspection: Inspection) -> tuple[BlobRef, ...]:
    """The blobs of an inspection."""
    made = (inspection.prepared, inspection.references, inspection.controls, inspection.alpha)
    return tuple(ref for ref in made if ref is not None)


def of_encoding(encoding: Encoding) -> tuple[BlobRef, ...]:
    """The blobs of an encoding that are the job's alone."""
    shared = (encoding.text,) if encoding.references is None else (encoding.text, encoding.references)
    return *shared, *encoding.controls, *encoding.rows


def of_record(record: JobRecord) -> Iterator[BlobRef]:
    """The blobs that a record names, but for the job's inputs and pictures."""
    if record.inspection is not None:
        yield from of_inspection(record.inspection)
    if record.encoding is not None:
        yield from of_encoding(record.encoding)
    for row in record.rows:
        if row.latents is not None:
            yield row.latents
        if row.resume is not None:
            yield row.resume.latents


UNWRITTEN_S: Final = 1.0
"""A state that lasts this long is written by itself: the next change may be far away."""

Stage = Literal["prepare", "queue", "denoise", "finish"]
Compute = Literal["inspect", "encode", "denoise", "decode", "paste"]


class JobEndedError(Exception):
    """The job is terminal, and not by this walk: it was cancelled uncarried, or another router ended it."""


class StageTimer:
    """A timer of a job's stages: it adds to the times that the record already holds, of earlier attempts.

    The job has just waited `waited_ms` in the work queue, which count as spent.
    """

    def __init__(self, record: JobRecord, waited_ms: float = 0.0) -> None:
        self._stage_ms = record.stage_ms.known()
        self._compute_ms = record.compute_ms.known()
        self._stage_ms["queue"] += waited_ms
        self._spent_before_ms = record.spent_ms + int(waited_ms)
        self._began_s = time.monotonic()
        self._denoised: list[tuple[float, float]] = []
        """When rows were begun and done, by the monotonic clock."""

    def compute(self, name: Compute, ms: float) -> None:
        """Add `ms` of computing."""
        self._compute_ms[name] += ms

    @contextmanager
    def timing(self, name: Stage) -> Iterator[None]:
        """Add the time inside to a stage."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._stage_ms[name] += (time.monotonic() - began_s) * 1000

    @contextmanager
    def denoising(self) -> Iterator[None]:
        """Rows are computed inside; until the first one begins, the job waits in the queue."""
        entered_s = time.monotonic()
        try:
            yield
        finally:
            began_s = min((began for began, _ in self._denoised), default=time.monotonic())
            ended_s = max((ended for _, ended in self._denoised), default=began_s)
            self._stage_ms["queue"] += max(0.0, began_s - entered_s) * 1e3
            self._stage_ms["denoise"] += (ended_s - began_s) * 1e3
            self._denoised.clear()

    def denoised(self, denoise_ms: float) -> None:
        """Rows are computed now; `denoise_ms` passed from their first step to their last."""
        now = time.monotonic()
        self._denoised.append((now - denoise_ms / 1e3, now))

    def times(self) -> JobTimes:
        """The times, as a record holds them."""
        spent_ms = self._spent_before_ms + int((time.monotonic() - self._began_s) * 1000)
        return JobTimes(StageTimes(**self._stage_ms), ComputeTimes(**self._compute_ms), spent_ms)


class LiveJobRecord:
    """A job's record, the events that tell of it, and the job's time.

    A change is written over the revision that is known here, and the record is read only where another writer was
    faster. A state that is not the last is told at once, and written with the next change.
    """

    def __init__(
        self, bus: Bus, records: JobRecordStore, known: RecordRevision[JobRecord], waited_ms: float = 0.0
    ) -> None:
        self._bus, self._records, self._known = bus, records, known
        self.job = known.record.job
        self.sheet = StageTimer(known.record, waited_ms)
        self.deadline = Deadline.after_ms(self.job.budget_ms - known.record.spent_ms - waited_ms)
        self.doing = "waiting in the queue"
        """What the job was at, for the error that says that its time is over."""
        self._entered: JobState | None = None
        """The state that no revision has yet."""
        self._entered_s = 0.0

    @property
    def record(self) -> JobRecord:
        """The latest revision that is known, which lacks a state that was entered since."""
        return self._known.record

    async def change(self, change: Change[JobRecord]) -> JobRecord:
        """The record after `change`; raises as :meth:`check`."""
        await self.revise(change)
        return self.check()

    async def reread(self) -> JobRecord:
        """The record as it stands; raises as :meth:`check`."""
        self._learn(await self._records.read(self.job.job_id))
        return self.check()

    async def enter(self, state: JobState) -> None:
        """The job is in a state that is not terminal: tell it, and write it with the next change."""
        self._entered, self._entered_s = state, time.monotonic()
        await self.tell(state, self.record.attempt)

    def unwritten(self, now: float) -> bool:
        """Return whether a state was entered some time ago, and no revision has it."""
        return self._entered is not None and now - self._entered_s >= UNWRITTEN_S

    async def write_state(self) -> None:
        """Write the state that was entered, unless another change has taken it along, or will after a failure."""
        self._entered_s = time.monotonic()
        try:
            await self.revise(lambda record: record)
        except (GiornataError, nats.errors.Error, LeaseEndedError) as error:
            log.warning("state_not_written", job=self.job.job_id, error=repr(error))

    async def revise(self, change: Change[JobRecord]) -> None:
        """Change the record, unless it is terminal, whatever it says then."""
        taken: JobState | None = None

        def changed(record: JobRecord) -> JobRecord | None:
            nonlocal taken
            taken = self._entered
            if taken is not None:
                record = entered(record, taken, self.sheet.times())
            return change(record)

        revised = await self._records.revise(self.job.job_id, changed, self._known)
        if self._entered is taken:
            self._entered = None
        self._learn(revised)

    def _learn(self, found: RecordRevision[JobRecord]) -> None:
        """Keep the later revision: several tasks of a walk read and change the record at once."""
        if found.revision >= self._known.revision:
            self._known = found

    def check(self) -> JobRecord:
        """The latest revision that is known.

        Raises:
            JobEndedError: it is terminal.
            JobCancelled: a cancel was asked for.
        """
        heed_cancel()
        if self.record.state.terminal:
            raise JobEndedError
        if self.record.cancel:
            raise JobCancelled
        return self.record

    async def tell(self, state: JobState, attempt: int) -> None:
        """Tell that the job is in a state that is not terminal."""
        event = StateEvent(job_id=self.job.job_id, state=state, attempt=attempt)
        await self._bus.publish(self._subject(EventKind.STATE), event)

    async def tell_end(self) -> None:
        """Tell that the job has ended. A router that was believed dead, or the next one, may tell it again."""
        record, job_id = self.record, self.job.job_id
        event = DoneEvent(
            job_id=job_id,
            state=record.state,
            error=record.error,
            stage_ms=record.stage_ms,
            slo_met=record.slo_met,
        )
        await self._bus.publish(self._subject(EventKind.DONE), event, message_id=f"{job_id}-done")

    def _subject(self, kind: EventKind) -> str:
        return subjects.event(self.job.gateway, self.job.job_id, kind)
