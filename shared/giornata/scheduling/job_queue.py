"""Accepted jobs that nothing was done for yet, whose turn is next, and how many run at a time. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from giornata.scheduling.queue import AGEING_S, VOID, FairShares
from giornata.wire.jobs import Job, Priority

# Accepted jobs that nothing was done for yet, and whose turn is next: all that is queued, in memory. Pure.
#
# Within a class tenants take turns by their shares (`giornata.scheduling.queue`), as prepared rows do
# (`giornata.scheduling.queue`), and a tenant's jobs come in the order of their arrival.
#
# Batch jobs come after interactive ones. A batch job that has waited for a while joins the interactive
# class, in a flow of its tenant's aged batch jobs. It does not starve, and a flood of batch jobs, however
# old, delays its tenant's next interactive job by about one job.


_Flow = tuple[str, Priority]
"""A tenant's jobs of one priority."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as it is known before its pictures are inspected."""

    job_id: str
    priority: Priority
    tenant: str
    weight: float
    """Weight of the tenant, above 0: with twice the weight, twice the share."""
    model_digest: str
    rows: int
    steps: int
    """Denoising steps of each row."""
    since_s: float
    """When it was accepted, by the clock of `now`."""
    budget_s: float
    """Time allowed for it since then."""

    @classmethod
    def of(cls, job: Job, now: float) -> QueuedJob:
        """A job that is accepted `now`."""
        asked = job.parameters
        return cls(
            job.job_id,
            job.priority,
            job.tenant,
            job.weight,
            job.model_digest,
            asked.n,
            max(1, job.denoising_steps),
            now,
            job.budget_ms / 1e3,
        )

    @property
    def flow(self) -> _Flow:
        """Jobs of one flow come in order."""
        return self.tenant, self.priority


class NextJob(NamedTuple):
    """The job that comes next."""

    job: QueuedJob
    yields: bool
    """It is a batch job that has not aged: it comes after all interactive ones."""


class _FlowQueue:
    """Jobs of one class, by flow; the flow with the least start tag comes next."""

    def __init__(self) -> None:
        self._shares = FairShares[_Flow]()
        self._jobs: dict[_Flow, OrderedDict[str, tuple[QueuedJob, int]]] = {}
        """The jobs of each flow that has any, in order, and how many had joined it before."""
        self._joined: Counter[_Flow] = Counter()
        """How many jobs have joined each flow since it was empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def join(self, job: QueuedJob) -> None:
        self._jobs.setdefault(job.flow, OrderedDict())[job.job_id] = job, self._joined[job.flow]
        self._shares.join(job.flow, job.weight)
        self._joined[job.flow] += 1
        self._size += 1

    def leave(self, job: QueuedJob) -> None:
        jobs = self._jobs[job.flow]
        del jobs[job.job_id]
        self._shares.leave(job.flow)
        self._size -= 1
        if not jobs:
            del self._jobs[job.flow], self._joined[job.flow]

    def first(self) -> QueuedJob | None:
        flow = self._shares.first()
        return None if flow is None else next(iter(self._jobs[flow].values()))[0]

    def serve(self, job: QueuedJob) -> None:
        """Take out the job that :meth:`first` has returned."""
        self._shares.charge(job.flow, job.rows * job.steps)
        self.leave(job)

    def ahead(self, job: QueuedJob) -> float:
        """About how many jobs come before `job`, which may be new: each other flow has its share until then."""
        own = len(self._jobs.get(job.flow, ()))
        if job.flow in self._jobs and job.job_id in self._jobs[job.flow]:
            joined = self._jobs[job.flow][job.job_id][1]
            own = max(0, joined - self._joined[job.flow] + own)
        found = float(own)
        for flow, others in self._jobs.items():
            if flow != job.flow:
                weight = next(iter(others.values()))[0].weight
                found += min(len(others), (own + 1) * weight / job.weight)
        return found


class _JobTimers:
    """Times of jobs, the earliest first; of equal ones that which was set first."""

    def __init__(self) -> None:
        self._times: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = count()

    def set(self, job_id: str, time_s: float) -> None:
        self._times[job_id] = time_s, next(self._numbers)
        heappush(self._heap, (*self._times[job_id], job_id))

    def drop(self, job_id: str) -> None:
        self._times.pop(job_id, None)
        if len(self._heap) > 2 * len(self._times) + VOID:
            self._heap = sorted((*turn, job_id) for job_id, turn in self._times.items())

    def due(self, now: float) -> Iterator[str]:
        """Jobs with a time that has come, once each."""
        while self._heap and self._heap[0][0] <= now:
            time_s, number, job_id = heappop(self._heap)
            if self._times.get(job_id) == (time_s, number):
                del self._times[job_id]
                yield job_id


class JobQueue:
    """Every queued job that is not carried yet."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._interactive, self._batch = _FlowQueue(), _FlowQueue()
        self._jobs: dict[str, tuple[QueuedJob, _FlowQueue]] = {}
        self._ages, self._ends = _JobTimers(), _JobTimers()
        """When batch jobs age, and when budgets end."""
        self._rows = self._steps = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    @property
    def rows(self) -> int:
        """Pictures that are asked for."""
        return self._rows

    @property
    def steps(self) -> int:
        """Row steps: their steps, summed up."""
        return self._steps

    def join(self, job: QueuedJob) -> None:
        """Let a job wait for its turn."""
        flows = self._interactive if job.priority is Priority.INTERACTIVE else self._batch
        flows.join(job)
        self._jobs[job.job_id] = job, flows
        self._count(job, 1)
        self._ends.set(job.job_id, job.since_s + job.budget_s)
        if flows is self._batch:
            self._ages.set(job.job_id, job.since_s + self._ageing_s)

    def leave(self, job_id: str) -> QueuedJob | None:
        """Take a job out; None if it does not wait."""
        if job_id not in self._jobs:
            return None
        job, flows = self._jobs[job_id]
        flows.leave(job)
        self._forget(job)
        return job

    def next(self, now: float) -> NextJob | None:
        """The job that comes next, which stays until it is served; None where none waits."""
        for job_id in self._ages.due(now):
            job, _ = self._jobs[job_id]
            self._batch.leave(job)
            self._interactive.join(job)
            self._jobs[job_id] = job, self._interactive
        first = self._interactive.first()
        if first is not None:
            return NextJob(first, yields=False)
        first = self._batch.first()
        return None if first is None else NextJob(first, yields=True)

    def serve(self, turn: NextJob) -> None:
        """Take out the job that :meth:`next` has just returned."""
        self._jobs[turn.job.job_id][1].serve(turn.job)
        self._forget(turn.job)

    def overdue(self, now: float) -> list[QueuedJob]:
        """Jobs with budgets that have ended, once each; they stay until they leave."""
        return [self._jobs[job_id][0] for job_id in self._ends.due(now)]

    def ahead(self, job: QueuedJob) -> int:
        """About how many jobs come before `job`, waiting or new, if jobs are alike."""
        flows = self._batch if job.priority is Priority.BATCH else self._interactive
        if job.job_id in self._jobs:
            flows = self._jobs[job.job_id][1]
        before = len(self._interactive) if flows is self._batch else 0
        return before + round(flows.ahead(job))

    def _forget(self, job: QueuedJob) -> None:
        del self._jobs[job.job_id]
        self._ages.drop(job.job_id)
        self._ends.drop(job.job_id)
        self._count(job, -1)

    def _count(self, job: QueuedJob, sign: int) -> None:
        self._rows += sign * job.rows
        self._steps += sign * job.rows * job.steps


# How many jobs are carried at a time: as many as the fleet can compute, and as many again on their way.
# Pure.


class InFlightJobWindow:
    """Rows of carried jobs, from the beginning of their inspection to their end.

    Twice what ready workers hold at once: while a worker computes its rows, as many others are inspected, encoded or
    decoded. With few workers or none, `prepared_rows` are prepared ahead of them all the same.

    Tenants share it. A batch job that yields is carried only while there is room beside all others; interactive ones do
    not wait for it.
    """

    def __init__(self, prepared_rows: int) -> None:
        self._prepared_rows = prepared_rows
        self._capacity_rows = 0
        self._jobs: dict[str, tuple[QueuedJob, bool]] = {}
        """Each job, and whether it yields."""
        self._used = {False: 0, True: 0}

    @property
    def rows(self) -> int:
        """Rows that may be carried; the last job may have more."""
        return self._capacity_rows + max(self._prepared_rows, self._capacity_rows)

    def resize(self, capacity_rows: int) -> None:
        """Follow the fleet: ready workers hold so many rows at once."""
        self._capacity_rows = capacity_rows

    def has_room(self, turn: NextJob) -> bool:
        """Return whether the job may be carried now."""
        used = self._used[False] + (self._used[True] if turn.yields else 0)
        return used < self.rows or self.within_share(turn.job)

    def begin(self, turn: NextJob) -> None:
        """The job is carried from now on."""
        self._jobs[turn.job.job_id] = turn.job, turn.yields
        self._used[turn.yields] += turn.job.rows

    def end(self, job: QueuedJob) -> None:
        """The job is not carried any more, if it was."""
        if job.job_id in self._jobs:
            begun, yields = self._jobs.pop(job.job_id)
            self._used[yields] -= begun.rows

    def within_share(self, job: QueuedJob) -> bool:
        """Whether a tenant beside others has less than its share of the carried rows: its jobs exceed a full window.

        A batch job's do not where interactive ones fill it.
        """
        if job.priority is Priority.BATCH and self._used[False] >= self.rows:
            return False
        jobs = [job, *(carried for carried, _ in self._jobs.values())]
        weights = {one.tenant: one.weight for one in jobs}
        own = sum(one.rows for one in jobs if one.tenant == job.tenant)
        return len(weights) > 1 and own <= self.rows * job.weight / sum(weights.values())
