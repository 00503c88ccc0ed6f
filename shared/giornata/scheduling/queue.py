"""The queue of jobs for workers: fair between tenants, by priority, never starving. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from giornata.scheduling.demand import JobDemand
from giornata.wire.jobs import Priority

# What waits in the line, summed up by priority while jobs join and leave. Pure.


@dataclass
class DemandTotal:
    """Sums over entries of the line. Sizes are whole numbers, so that nothing is lost by adding and taking away."""

    jobs: int = 0
    rows: int = 0
    steps: int = 0
    size: float = 0.0
    """See :attr:`giornata.scheduling.demand.JobDemand.size`."""

    def count(self, demand: JobDemand, sign: int) -> None:
        """Add what a job asks for (`sign` 1), or take it away (-1)."""
        self.jobs += sign
        self.rows += sign * demand.rows
        self.steps += sign * demand.steps
        self.size += sign * demand.size

    def __add__(self, other: DemandTotal) -> DemandTotal:
        return DemandTotal(
            self.jobs + other.jobs, self.rows + other.rows, self.steps + other.steps, self.size + other.size
        )


class QueueTotals:
    """A :class:`DemandTotal` for each priority."""

    def __init__(self) -> None:
        self._by_priority = {priority: DemandTotal() for priority in Priority}
        self.adapted = 0
        """Entries that need adapters."""

    def count(self, priority: Priority, demand: JobDemand, sign: int) -> None:
        """See :meth:`DemandTotal.count`."""
        self._by_priority[priority].count(demand, sign)
        self.adapted += sign * bool(demand.adapters)

    def before(self, priority: Priority) -> DemandTotal:
        """Return what comes before a new job of `priority`: batch jobs never before an interactive one."""
        interactive = self._by_priority[Priority.INTERACTIVE]
        return interactive if priority is Priority.INTERACTIVE else self.all

    @property
    def all(self) -> DemandTotal:
        """The sum over all."""
        return self._by_priority[Priority.INTERACTIVE] + self._by_priority[Priority.BATCH]


# Jobs that wait for a worker, and what a line of them promises. Pure.


AGEING_S: Final = 30.0
"""A batch job that has waited for so long comes as if it were interactive."""


LOOK_S: Final = 0.25
"""Least time between two looks at who probably computes the first in line: a bound on what they cost."""
RELOOK_S: Final = 1.0
"""Time after which they are looked at though nobody has joined or left: workers have gone on meanwhile."""


Key = tuple[str, int]
"""A job and a number: rows of one job may join the line several times, where some came back from a lost worker."""


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


class RowQueue(Protocol):
    """Jobs that are prepared, with rows that no worker has taken yet.

    No row is lost or served twice, and none waits for ever while others are served: the contract suite of lines
    (`tests/unit/scheduling/test_lines.py`) holds every implementation to that.
    """

    @property
    def totals(self) -> QueueTotals:
        """Return what the rows that wait ask for, summed up."""

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """Return how many rows wait, by name and digest of the models that jobs wait for."""

    def __len__(self) -> int: ...

    def __contains__(self, job_id: object) -> bool: ...

    def __iter__(self) -> Iterator[QueuedRows]: ...

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

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> JobDemand:
        """Take `rows`, which have got a worker, out of the line, and return what they ask for.

        `now` is that of the order by which they were served. `passes` is a job that came before them and is served
        later, since there is no room for it.
        """

    def tell(self, key: Key, worker: str) -> None:
        """Note that `worker` was told to load what an entry needs, since it is the likely one."""

    def leave(self, key: Key) -> None:
        """Take all rows of an entry out of the line, if it has any."""

    def order(self, now: float) -> list[QueuedRows]:
        """All that wait, in the order of their turns."""

    def changes_at(self, now: float) -> float | None:
        """Return when the order changes next if no job joins or leaves; None if it does not."""

    @property
    def looks_at(self) -> float | None:
        """Return when the likely workers of those who wait are to be chosen anew; None where nobody needs adapters.

        :data:`LOOK_S` after they were last where the line has changed since, else :data:`RELOOK_S`.
        """

    def looked(self, now: float) -> None:
        """Note that likely workers are chosen `now`."""


# The books that every line keeps: what waits, of which jobs and models. Pure.


H = TypeVar("H", bound=Hashable)


class RowQueueBase:
    """Rows by entry. Lines add the order: they are told of each entry that joins, is served and leaves."""

    def __init__(self) -> None:
        self._waiting: dict[Key, QueuedRows] = {}
        self._jobs: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()
        self._totals = QueueTotals()
        self._tickets = itertools.count()
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
    def totals(self) -> QueueTotals:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        return self._totals

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        return self._models

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
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        ticket = next(self._tickets)
        indices = tuple(range(demand.rows) if rows is None else rows)
        demand = replace(demand, ticket=ticket)
        told = frozenset[str]() if fetching is None else frozenset({fetching})
        joined = QueuedRows((job_id, ticket), indices, demand, claim, now, fetching=fetching, told=told)
        self._waiting[joined.key] = joined
        self._jobs[job_id] += 1
        self._models[joined.model] += len(joined.rows)
        self._totals.count(claim.priority, demand, 1)
        self._changed = True
        self._joined(joined, now)
        return joined

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> JobDemand:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        entry = self._waiting[key]
        if passes is not None:
            passed = self._waiting[passes]
            self._waiting[passes] = replace(passed, passed=passed.passed + len(rows))
        shapes = (shape for row, shape in zip(entry.rows, entry.demand.shapes, strict=True) if row in rows)
        served = replace(entry.asked(now), shapes=tuple(shapes))
        self._changed = True
        self._served(entry, served, now, whole=len(rows) == len(entry.rows))
        if len(rows) == len(entry.rows):
            self.leave(key)
        else:
            left = self._waiting[key] = entry.without(rows)
            self._models[entry.model] -= len(rows)
            self._totals.count(entry.claim.priority, entry.demand, -1)
            self._totals.count(entry.claim.priority, left.demand, 1)
        return served

    def tell(self, key: Key, worker: str) -> None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        entry = self._waiting[key]
        self._waiting[key] = replace(entry, fetching=worker, told=entry.told | {worker})

    @property
    def looks_at(self) -> float | None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        if not self._totals.adapted:
            return None
        return self._looked_s + (LOOK_S if self._changed else RELOOK_S)

    def looked(self, now: float) -> None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        self._looked_s, self._changed = now, False

    def leave(self, key: Key) -> None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return
        self._changed = True
        _count_off(self._jobs, entry.job_id)
        _count_off(self._models, entry.model, len(entry.rows))
        self._totals.count(entry.claim.priority, entry.demand, -1)
        self._left(entry)

    def _joined(self, entry: QueuedRows, now: float) -> None:
        """An entry waits from now on."""
        raise NotImplementedError

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        """Rows of an entry have got a worker, or all of them: the entry leaves next."""
        raise NotImplementedError

    def _left(self, entry: QueuedRows) -> None:
        """An entry waits no more."""
        raise NotImplementedError


def _count_off(counted: Counter[H], one: H, times: int = 1) -> None:
    counted[one] -= times
    if not counted[one]:
        del counted[one]


# Whose turn it is among flows of jobs: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Pure.
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


# The line that is used by default: fair between tenants, by priority, never starving. Pure.
#
# Tenants take turns by their shares (`giornata.scheduling.queue`). A tenant's jobs come in the order of
# their arrival, but each is deferred by a multiple of its work that no worker has: small jobs pass large
# ones, since so most jobs end soonest, but only those that come soon after. Jobs whose rows stay together
# come before all others of their tenant. Batch jobs come after interactive ones until they have waited for
# a while.


DEFERRED: Final = 5.0
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


class FairQueue(RowQueueBase):
    """See :class:`giornata.scheduling.queue.RowQueue`.

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
        """See :class:`giornata.scheduling.queue.RowQueue`."""
        ordered = self._by_turns(now)
        if self._favoured >= FAVOURED:
            by_turn = (e for e in ordered if self._aged(e, now) and self._due_s(e, now) == math.inf)
            if (first := next(by_turn, None)) is not None:
                ordered.remove(first)
                ordered.insert(0, first)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """See :class:`giornata.scheduling.queue.RowQueue`."""
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

    def _joined(self, entry: QueuedRows, now: float) -> None:  # noqa: ARG002 - other lines need the time
        self._shares.join(entry.claim.tenant, entry.claim.weight)

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        self._shares.charge(entry.claim.tenant, max(1, served.steps))
        if whole:
            self._favoured = self._favoured + 1 if self._due_s(entry, now) < math.inf else 0

    def _left(self, entry: QueuedRows) -> None:
        self._shares.leave(entry.claim.tenant)
