"""The queues of jobs: fair between tenants, by priority, never starving. Pure.

Accepted jobs that nothing was done for yet wait in a :class:`JobQueue`; as many as the fleet computes, and as many
again, are prepared (:class:`InFlightJobWindow`); their rows wait for workers in a :class:`FairQueue`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeVar

from giornata.scheduling.demand import JobDemand
from giornata.wire.jobs import Job, Priority

AGEING_S: Final = 30.0
"""A batch job that has waited for so long comes as if it were interactive."""
LOOK_S: Final = 0.25
"""Least time between two looks at who probably computes the first in line: a bound on what they cost."""
RELOOK_S: Final = 1.0
"""Time after which they are looked at though nobody has joined or left: workers have gone on meanwhile."""

Key = tuple[str, int]
"""A job and a number: rows of one job may join the line several times, where some came back from a lost worker."""


class DemandTotal(NamedTuple):
    """Sums over entries of a queue. Sizes are whole numbers, so that nothing is lost by adding and taking away."""

    jobs: int = 0
    rows: int = 0
    steps: int = 0
    size: float = 0.0
    """See :attr:`giornata.scheduling.demand.JobDemand.size`."""

    def plus(self, other: DemandTotal, sign: int = 1) -> DemandTotal:
        """The sum, or where `sign` is -1 the difference."""
        return DemandTotal(
            self.jobs + sign * other.jobs,
            self.rows + sign * other.rows,
            self.steps + sign * other.steps,
            self.size + sign * other.size,
        )


@dataclass(frozen=True)
class SchedulingParams:
    """The values that decide when a job's turn comes."""

    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant, above 0: with twice the weight, twice the share."""
    finish_by_s: float | None = None
    """When its rows should be computed, by the clock of `now`; None for no wish."""
    takes_s: float = 0.0
    """The least time that one of them takes, or all of them where they stay together; 0 where it is not known."""


@dataclass(frozen=True)
class QueuedRows:
    """Rows of a job in the line."""

    key: Key
    rows: tuple[int, ...]
    """Indices of the rows that have no worker yet."""
    demand: JobDemand
    """What these rows ask for, in the same order."""
    claim: SchedulingParams
    since_s: float
    passed: int = 0
    """Rows of later jobs of the same model that were served first, since they needed less room."""
    fetching: str | None = None
    """The worker that was told last to load the job's template and adapters, since it is the likely one."""
    told: frozenset[str] = frozenset()
    """All workers that were told so."""

    @property
    def takes_s(self) -> float:
        """The least time that its rows take one after the other."""
        return self.claim.takes_s * len(self.rows)

    @property
    def job_id(self) -> str:
        """The job of the rows."""
        return self.key[0]

    @property
    def model(self) -> tuple[str, str]:
        """Name and digest."""
        return self.demand.model, self.demand.model_digest

    def asked(self, now: float) -> JobDemand:
        """The demand, with the time that is left."""
        if self.claim.finish_by_s is None:
            return self.demand
        return replace(self.demand, within_ms=(self.claim.finish_by_s - now) * 1e3)

    def without(self, rows: Collection[int]) -> QueuedRows:
        """The rows that are left once `rows` have workers; they take turns as the next job would."""
        left = [place for place, row in enumerate(self.rows) if row not in rows]
        shapes = tuple(self.demand.shapes[place] for place in left)
        demand = replace(self.demand, shapes=shapes, ticket=self.demand.ticket + len(rows))
        return replace(self, rows=tuple(self.rows[place] for place in left), demand=demand)


H = TypeVar("H", bound=Hashable)


class RowQueue:
    """Jobs that are prepared, with rows that no worker has taken yet; a subclass adds the order of their turns.

    No row is lost or served twice, and none waits for ever while others are served: the contract suite of lines
    (`tests/unit/scheduling/test_lines.py`) holds every implementation to that.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, QueuedRows] = {}
        self._jobs: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()
        self._totals = dict.fromkeys(Priority, DemandTotal())
        self._adapted = 0
        """Entries that need adapters."""
        self._tickets = count()
        self._looked_s = -math.inf
        self._changed = False
        """Whether somebody has joined or left since."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[QueuedRows]:
        return iter(self._waiting.values())

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """Return how many rows wait, by name and digest of the models that jobs wait for."""
        return self._models

    @property
    def total(self) -> DemandTotal:
        """The sum over all that wait."""
        return self._totals[Priority.INTERACTIVE].plus(self._totals[Priority.BATCH])

    def before(self, priority: Priority) -> DemandTotal:
        """Return what comes before a new job of `priority`: batch jobs never before an interactive one."""
        return self._totals[priority] if priority is Priority.INTERACTIVE else self.total

    def join(
        self,
        job_id: str,
        demand: JobDemand,
        claim: SchedulingParams,
        now: float,
        *,
        rows: Sequence[int] | None = None,
        fetching: str | None = None,
    ) -> QueuedRows:
        """Let rows of a job wait for their turn; `rows` are their indices, by default counted from 0."""
        ticket = next(self._tickets)
        indices = tuple(range(demand.rows) if rows is None else rows)
        told = frozenset[str]() if fetching is None else frozenset({fetching})
        demand = replace(demand, ticket=ticket)
        joined = QueuedRows((job_id, ticket), indices, demand, claim, now, fetching=fetching, told=told)
        self._jobs[job_id] += 1
        self._put(joined)
        self._joined(joined, now)
        return joined

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> JobDemand:
        """Take `rows`, which have got a worker, out of the line, and return what they ask for.

        `now` is that of the order by which they were served. `passes` is a job that came before them and is served
        later, since there is no room for it.
        """
        entry = self._waiting[key]
        if passes is not None:
            passed = self._waiting[passes]
            self._waiting[passes] = replace(passed, passed=passed.passed + len(rows))
        shapes = (shape for row, shape in zip(entry.rows, entry.demand.shapes, strict=True) if row in rows)
        served = replace(entry.asked(now), shapes=tuple(shapes))
        whole = len(rows) == len(entry.rows)
        self._served(entry, served, now, whole=whole)
        if whole:
            self.leave(key)
        else:
            self._count(entry, -1)
            self._put(entry.without(rows))
        return served

    def tell(self, key: Key, worker: str) -> None:
        """Note that `worker` was told to load what an entry needs, since it is the likely one."""
        entry = self._waiting[key]
        self._waiting[key] = replace(entry, fetching=worker, told=entry.told | {worker})

    def leave(self, key: Key) -> None:
        """Take all rows of an entry out of the line, if it has any."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return
        _count_off(self._jobs, entry.job_id)
        self._count(entry, -1)
        self._left(entry)

    def order(self, now: float) -> list[QueuedRows]:
        """All that wait, in the order of their turns."""
        raise NotImplementedError

    def changes_at(self, now: float) -> float | None:
        """Return when the order changes next if no job joins or leaves; None if it does not."""
        raise NotImplementedError

    @property
    def looks_at(self) -> float | None:
        """Return when the likely workers of those who wait are to be chosen anew; None where nobody needs adapters.

        :data:`LOOK_S` after they were last where the line has changed since, else :data:`RELOOK_S`.
        """
        if not self._adapted:
            return None
        return self._looked_s + (LOOK_S if self._changed else RELOOK_S)

    def looked(self, now: float) -> None:
        """Note that likely workers are chosen `now`."""
        self._looked_s, self._changed = now, False

    def _joined(self, entry: QueuedRows, now: float) -> None:
        """An entry waits from now on."""
        raise NotImplementedError

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        """Rows of an entry have got a worker, or all of them: the entry leaves next."""
        raise NotImplementedError

    def _left(self, entry: QueuedRows) -> None:
        """An entry waits no more."""
        raise NotImplementedError

    def _put(self, entry: QueuedRows) -> None:
        self._waiting[entry.key] = entry
        self._count(entry, 1)

    def _count(self, entry: QueuedRows, sign: int) -> None:
        demand, priority = entry.demand, entry.claim.priority
        asked = DemandTotal(1, demand.rows, demand.steps, demand.size)
        self._totals[priority] = self._totals[priority].plus(asked, sign)
        _count_off(self._models, entry.model, -sign * demand.rows)
        self._adapted += sign * bool(demand.adapters)
        self._changed = True


def _count_off(counted: Counter[H], one: H, times: int = 1) -> None:
    counted[one] -= times
    if not counted[one]:
        del counted[one]


# Whose turn it is among flows of jobs: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).
#
# Every flow, such as a tenant, has a start tag: the virtual time at which its next work begins. The flow
# with the least tag is next, and what it is served moves its tag on by the work over its weight. So a
# tenant with a thousand jobs delays another tenant's single job by about one job, and the order of a
# tenant's own jobs is free. A job that leaves unserved costs its flow nothing.
#
# Virtual time moves on by the work over the weights of all flows that wait, and is never before the least
# of their tags (WF2Q+, Bennett and Zhang, INFOCOM 1996). It passes every tag in the end: no stream of new
# flows starves an old one, and no flow is remembered for ever.


F = TypeVar("F", bound=Hashable)

VOID: Final = 64
"""So many void entries may there be beside as many as are needed."""


class _StartTag(NamedTuple, Generic[F]):
    """The start of the next work of a flow."""

    tag: float
    ticket: int
    """Of equal tags the older one comes first."""
    flow: F


class FairShares(Generic[F]):
    """The start tags of flows that wait, and of flows that had more than their share lately; operations in O(log n)."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._places: dict[F, _StartTag[F]] = {}
        self._waiting: dict[F, tuple[int, float]] = {}
        """How many jobs of a flow wait, and its weight."""
        self._weights = 0.0
        """Their sum."""
        self._heap: list[_StartTag[F]] = []
        """Places of flows that wait, and void ones."""
        self._tickets = count()
        self._most = VOID
        """With more places than these, void ones are dropped."""

    def __len__(self) -> int:
        return max(len(self._places), len(self._heap))

    def tag(self, flow: F) -> float:
        """Return where the next work of a flow that waits begins, in virtual time."""
        return self._places[flow].tag

    def first(self) -> F | None:
        """The flow with the least tag; None where none waits."""
        while self._heap:
            place = self._heap[0]
            if place.flow in self._waiting and self._places[place.flow] is place:
                return place.flow
            heappop(self._heap)
        return None

    def join(self, flow: F, weight: float) -> None:
        """One more job of `flow` waits; `weight`, above 0, is the flow's from now on."""
        jobs, before = self._waiting.get(flow, (0, 0.0))
        first, known = self.first(), self._places.get(flow)
        self._waiting[flow] = jobs + 1, weight
        self._weights += weight - before
        if not jobs:
            self._virtual = max(self._virtual, 0.0 if first is None else self.tag(first))
            self._stand(flow, max(self._virtual, known.tag if known else 0.0))

    def leave(self, flow: F) -> None:
        """One job of `flow` waits no longer, served or not."""
        jobs, weight = self._waiting.pop(flow)
        if jobs > 1:
            self._waiting[flow] = jobs - 1, weight
        else:
            self._weights = self._weights - weight if self._waiting else 0.0  # no rounding adds up

    def charge(self, flow: F, work: float) -> None:
        """Serve `work` of a flow that waits."""
        self._virtual += work / self._weights
        self._stand(flow, self.tag(flow) + work / self._waiting[flow][1])

    def _stand(self, flow: F, tag: float) -> None:
        place = self._places[flow] = _StartTag(tag, next(self._tickets), flow)
        heappush(self._heap, place)
        if len(self) > self._most:
            known = self._places.items()
            kept = {f: at for f, at in known if f in self._waiting or at.tag > self._virtual}
            self._places, self._heap = kept, list(kept.values())
            heapify(self._heap)
            self._most = 2 * len(self._places) + VOID


# Tenants take turns by their shares (`giornata.scheduling.queue`). A tenant's jobs come in the order of
# their arrival, but each is deferred by a multiple of its work that no worker has: small jobs pass large
# ones, since so most jobs end soonest, but only those that come soon after. Jobs whose rows stay together
# come before all others of their tenant. Batch jobs come after interactive ones until they have waited for
# a while.


DEFERRED: Final = 2.0
"""A job comes after the jobs of its tenant that arrive within so many times its own work."""
FAVOURED: Final = 8
"""Jobs with a deadline that may come before one that has waited for :data:`AGEING_S`; then it is its turn."""
_Rank = tuple[bool, float, float, int]
"""What orders a tenant's jobs: whether it yields to interactive ones, its deadline, its deferred arrival, ticket."""


class TenantJobOrder(StrEnum):
    """The order of a tenant's own jobs."""

    LEAST_WORK = "least_work"
    """The least by its arrival and :data:`DEFERRED` times its work that no worker has."""
    ARRIVAL = "arrival"
    """The one that arrived first."""


class FairQueue(RowQueue):
    """Jobs take turns by their tenants' shares.

    `turn` says which job of a tenant comes first. `by_deadline`, jobs of a class that wish to end by a time come first,
    the earliest first, as long as they can; a job that cannot any more has no claim and takes its turn. Jobs that take
    their turn come every so often, however many others are urgent. `by_ends`, tenants come by the virtual time at which
    their next work ends, not begins: where works differ a thousandfold, a small one does not wait for a large one.
    """

    def __init__(
        self,
        *,
        by_deadline: bool = False,
        ageing_s: float = AGEING_S,
        turn: TenantJobOrder = TenantJobOrder.LEAST_WORK,
        by_ends: bool = False,
    ) -> None:
        super().__init__()
        self._by_deadline, self._ageing_s, self._turn = by_deadline, ageing_s, turn
        self._by_ends = by_ends
        self._shares = FairShares[str]()
        self._favoured = 0
        """Jobs that were served for their deadline, one after the other."""

    def order(self, now: float) -> list[QueuedRows]:
        """See :class:`RowQueue`."""
        ordered = self._by_turns(now)
        if self._favoured >= FAVOURED:
            by_turn = (e for e in ordered if self._aged(e, now) and self._due_s(e, now) == math.inf)
            if (first := next(by_turn, None)) is not None:
                ordered.remove(first)
                ordered.insert(0, first)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """See :class:`RowQueue`."""
        times: list[float] = []
        for entry in self:
            claim = entry.claim
            if self._by_deadline or claim.priority is Priority.BATCH:
                times.append(entry.since_s + self._ageing_s)
            if self._by_deadline and claim.finish_by_s is not None:
                times.append(claim.finish_by_s - claim.takes_s)
        return min((time_s for time_s in times if time_s > now), default=None)

    def _by_turns(self, now: float) -> list[QueuedRows]:
        tenants = defaultdict[str, list[tuple[_Rank, QueuedRows]]](list)
        for entry in self:
            tenants[entry.claim.tenant].append((self._rank(entry, now), entry))
        turns: list[tuple[bool, float, float, int, QueuedRows]] = []
        for tenant, own in tenants.items():
            tag = self._shares.tag(tenant)
            for (yields, due_s, *_, ticket), entry in sorted(own, key=itemgetter(0)):
                end = tag + entry.demand.steps / entry.claim.weight
                turns.append((yields, due_s, end if self._by_ends else tag, ticket, entry))
                tag = end
        turns.sort(key=itemgetter(0, 1, 2, 3))
        return [entry for *_, entry in turns]

    def _rank(self, entry: QueuedRows, now: float) -> _Rank:
        yields = entry.claim.priority is Priority.BATCH and not self._aged(entry, now)
        turn_s = entry.since_s
        if self._turn is TenantJobOrder.LEAST_WORK:
            whole = entry.demand.together or entry.demand.alone
            turn_s = -math.inf if whole else turn_s + DEFERRED * entry.takes_s
        return yields, self._due_s(entry, now), turn_s, entry.key[1]

    def _aged(self, entry: QueuedRows, now: float) -> bool:
        return now - entry.since_s >= self._ageing_s

    def _due_s(self, entry: QueuedRows, now: float) -> float:
        """The deadline as long as it can be met; infinite otherwise."""
        claim = entry.claim
        if not self._by_deadline or claim.finish_by_s is None or claim.finish_by_s - claim.takes_s <= now:
            return math.inf
        return claim.finish_by_s

    def _joined(self, entry: QueuedRows, now: float) -> None:  # noqa: ARG002 - other queues need the time
        self._shares.join(entry.claim.tenant, entry.claim.weight)

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        self._shares.charge(entry.claim.tenant, max(1, served.steps))
        if whole:
            self._favoured = self._favoured + 1 if self._due_s(entry, now) < math.inf else 0

    def _left(self, entry: QueuedRows) -> None:
        self._shares.leave(entry.claim.tenant)


# Within a class tenants take turns by their shares, as prepared rows do, and a tenant's jobs come in the order of
# their arrival. Batch jobs come after interactive ones. A batch job that has waited for a while joins the interactive
# class, in a flow of its tenant's aged batch jobs. It does not starve, and a flood of batch jobs, however old, delays
# its tenant's next interactive job by about one job.


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
        return cls(
            *(job.job_id, job.priority, job.tenant, job.weight, job.model_digest, job.parameters.n),
            *(max(1, job.denoising_steps), now, job.budget_ms / 1e3),
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
        self._flows: dict[_Flow, OrderedDict[str, QueuedJob]] = {}
        """The jobs of each flow that has any, in order."""

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def join(self, job: QueuedJob) -> None:
        self._flows.setdefault(job.flow, OrderedDict())[job.job_id] = job
        self._shares.join(job.flow, job.weight)

    def leave(self, job: QueuedJob) -> None:
        del self._flows[job.flow][job.job_id]
        self._shares.leave(job.flow)
        if not self._flows[job.flow]:
            del self._flows[job.flow]

    def heads(self) -> list[QueuedJob]:
        """The first job of each flow."""
        return [next(iter(jobs.values())) for jobs in self._flows.values()]

    def first(self) -> QueuedJob | None:
        flow = self._shares.first()
        return None if flow is None else next(iter(self._flows[flow].values()))

    def serve(self, job: QueuedJob) -> None:
        """Take out the job that :meth:`first` has returned."""
        self._shares.charge(job.flow, job.rows * job.steps)
        self.leave(job)

    def ahead(self, job: QueuedJob) -> float:
        """About how many jobs come before `job`, which may be new: each other flow has its share until then."""
        jobs = self._flows.get(job.flow, OrderedDict())
        own = list(jobs).index(job.job_id) if job.job_id in jobs else len(jobs)
        return own + sum(
            min(len(others), (own + 1) * next(iter(others.values())).weight / job.weight)
            for flow, others in self._flows.items()
            if flow != job.flow
        )


class JobQueue:
    """Every queued job that is not carried yet."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._interactive, self._batch = _FlowQueue(), _FlowQueue()
        self._jobs: dict[str, tuple[QueuedJob, _FlowQueue]] = {}
        self.rows = self.steps = 0
        """Pictures that are asked for, and their steps, summed up."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def join(self, job: QueuedJob) -> None:
        """Let a job wait for its turn."""
        self._join(job, self._interactive if job.priority is Priority.INTERACTIVE else self._batch)
        self._count(job, 1)

    def leave(self, job_id: str) -> QueuedJob | None:
        """Take a job out; None if it does not wait."""
        job, flows = self._jobs.pop(job_id, (None, self._batch))
        if job is not None:
            flows.leave(job)
            self._count(job, -1)
        return job

    def next(self, now: float) -> NextJob | None:
        """The job that comes next, which stays until it is served; None where none waits."""
        while aged := [job for job in self._batch.heads() if job.since_s + self._ageing_s <= now]:
            for job in aged:
                self._batch.leave(job)
                self._join(job, self._interactive)
        for flows in (self._interactive, self._batch):
            if (first := flows.first()) is not None:
                return NextJob(first, yields=flows is self._batch)
        return None

    def serve(self, turn: NextJob) -> None:
        """Take out the job that :meth:`next` has just returned."""
        job, flows = self._jobs.pop(turn.job.job_id)
        flows.serve(job)
        self._count(job, -1)

    def overdue(self, now: float) -> list[QueuedJob]:
        """Jobs with budgets that have ended; they stay until they leave."""
        return [job for job, _ in self._jobs.values() if job.since_s + job.budget_s <= now]

    def ahead(self, job: QueuedJob) -> int:
        """About how many jobs come before `job`, waiting or new, if jobs are alike."""
        new = self._batch if job.priority is Priority.BATCH else self._interactive
        _, flows = self._jobs.get(job.job_id, (job, new))
        before = len(self._interactive) if flows is self._batch else 0
        return before + round(flows.ahead(job))

    def _join(self, job: QueuedJob, flows: _FlowQueue) -> None:
        flows.join(job)
        self._jobs[job.job_id] = job, flows

    def _count(self, job: QueuedJob, sign: int) -> None:
        self.rows += sign * job.rows
        self.steps += sign * job.rows * job.steps


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
        self._turns: dict[str, NextJob] = {}

    @property
    def rows(self) -> int:
        """Rows that may be carried; the last job may have more."""
        return self._capacity_rows + max(self._prepared_rows, self._capacity_rows)

    def resize(self, capacity_rows: int) -> None:
        """Follow the fleet: ready workers hold so many rows at once."""
        self._capacity_rows = capacity_rows

    def has_room(self, turn: NextJob) -> bool:
        """Return whether the job may be carried now."""
        return self._used(yields=turn.yields) < self.rows or self.within_share(turn.job)

    def begin(self, turn: NextJob) -> None:
        """The job is carried from now on."""
        self._turns[turn.job.job_id] = turn

    def end(self, job: QueuedJob) -> None:
        """The job is not carried any more, if it was."""
        self._turns.pop(job.job_id, None)

    def within_share(self, job: QueuedJob) -> bool:
        """Whether a tenant beside others has less than its share of the carried rows: its jobs exceed a full window.

        A batch job's do not where interactive ones fill it.
        """
        if job.priority is Priority.BATCH and self._used(yields=False) >= self.rows:
            return False
        jobs = [job, *(turn.job for turn in self._turns.values())]
        weights = {one.tenant: one.weight for one in jobs}
        own = sum(one.rows for one in jobs if one.tenant == job.tenant)
        return len(weights) > 1 and own <= self.rows * job.weight / sum(weights.values())

    def _used(self, *, yields: bool) -> int:
        """Rows beside which a job that yields, or one that does not, has to find room."""
        return sum(turn.job.rows for turn in self._turns.values() if yields or not turn.yields)
