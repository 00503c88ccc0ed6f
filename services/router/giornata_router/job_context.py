"""One job's record as its runner knows it, and what every runner uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel
from giornata.records import Change, Quarantine, RecordRevision
from giornata.wire import subjects
from giornata.wire.errors import JobCancelled
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import DoneEvent, EventKind, StateEvent
from giornata.wire.values import ComputeTimes, StageTimes
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch
from giornata_router.leadership import LeaderRecords, Leadership, WorkerClient
from giornata_router.prepost_client import PrepostClient
from giornata_router.rules import job_records
from giornata_router.rules.admission import FinishTimeEstimator
from giornata_router.rules.job_records import JobTimes
from giornata_router.stream_capacity import StreamCapacity

# What every walk uses.


RUN_REPLY_S: Final = 5.0
"""A worker answers at once whether it takes rows; after this time it counts as gone."""


@dataclass(frozen=True)
class RouterContext:
    """Edges and books of one router."""

    bus: Bus
    records: LeaderRecords
    prepost: PrepostClient
    dispatch: Dispatch
    forecasting: FinishTimeEstimator
    quarantine: Quarantine
    room: StreamCapacity
    config: RouterConfig
    workers: WorkerClient
    leadership: Leadership
    blobs: BlobStore


# One job's record as its walk knows it: changed by revision, looked at for a cancel or an end, told in
# events.
#
# Beside it is what the next revision will say of the job's time, and how much is left.


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
        self, bus: Bus, records: LeaderRecords, known: RecordRevision[JobRecord], waited_ms: float = 0.0
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
        await self._revise(change)
        return self.check()

    async def reread(self) -> JobRecord:
        """The record as it stands; raises as :meth:`check`."""
        self._learn(await self._records.read(self.job.job_id))
        return self.check()

    async def end(self, change: Change[JobRecord]) -> None:
        """Write the terminal state, if there is none yet."""
        await self._revise(change)

    async def enter(self, state: JobState) -> None:
        """The job is in a state that is not terminal: tell it, and write it with the next change."""
        self._entered, self._entered_s = state, time.monotonic()
        await self.tell(state, self.record.attempt)

    def unwritten(self, now: float) -> bool:
        """Return whether a state was entered some time ago, and no revision has it."""
        return self._entered is not None and now - self._entered_s >= UNWRITTEN_S

    async def write_state(self) -> None:
        """Write the state that was entered, unless another change has taken it along."""
        self._entered_s = time.monotonic()
        await self._revise(lambda record: record)

    async def _revise(self, change: Change[JobRecord]) -> None:
        taken: JobState | None = None

        def changed(record: JobRecord) -> JobRecord | None:
            nonlocal taken
            taken = self._entered
            if taken is not None:
                record = job_records.entered(record, taken, self.sheet.times())
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
            EndedError: it is terminal.
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
