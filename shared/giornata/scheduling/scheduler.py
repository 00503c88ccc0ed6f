"""The scheduler's protocol; the one that serves jobs in their turn; and rows that give way. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import CandidateWorker, Policy
from giornata.scheduling.queue import AGEING_S, LOOK_S, FairQueue, Key, QueuedRows, RowQueue, SchedulingParams
from giornata.scheduling.worker_state import Attempt
from giornata.shares import SharedPool, TenantAllocation
from giornata.wire.jobs import Priority

# Rows are placed one by one, so that the pictures of one job are computed side by side where several
# workers have room.


LOOKED_AT: Final = 16
"""How many of many workers a policy is asked about: so many with least to compute, and as many with the template."""
MAX_PASSED: Final = 32
"""Rows served before an older job that needs more room than they; after these a worker is kept free for it."""
MAX_CHOOSY: Final = 16
"""Jobs that may wait for a better worker while others are asked; a bound on the time that a decision takes."""
AHEAD: Final = 16
"""Entries, the first that wait, whose likely workers are known."""
AHEAD_S: Final = 15.0
"""Their loads begin once their turn is predicted within this time."""
ANY: Final = 1 << 30
"""Rows of a worker whose room does not matter, since there will be room later."""
ROW: Final = RowShape(text=0, image=1, computed=1, steps=1)
"""The least that a job asks for."""


class RowAssignment(NamedTuple):
    """Rows that one worker gets together, as one attempt."""

    key: Key
    """Where they wait in the line."""
    worker: str
    rows: tuple[int, ...]
    passes: Key | None = None
    """The job that came before them and has to wait, since no worker has room for it."""


class PrefetchRequest(NamedTuple):
    """A load that should begin, for rows that wait."""

    key: Key
    """Where they wait in the line."""
    worker: str
    """That probably gets them."""
    demand: JobDemand
    """What it should load for: those of the rows that it gets together."""


class SchedulingDecision(NamedTuple):
    """A decision of the scheduler. The caller applies it, in this order, before it asks again."""

    placements: tuple[RowAssignment, ...] = ()
    loads: tuple[PrefetchRequest, ...] = ()
    """Loads that should begin now and were not told before: none twice for one entry and worker. The caller tells the
    worker, and counts each by :meth:`Placement.fetch` and :meth:`RowQueue.tell`."""
    wake_at: float | None = None
    """When to ask again though nothing has happened, in seconds, after `now`; None: only when something has."""


class Scheduler(Protocol):
    """Chooses which waiting rows go to which workers."""

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """Return what happens at `now`, on the clock by which `line` and `placement` are fed.

        Both stay as they are, but for when the line's likely workers were looked at (:meth:`RowQueue.looked`).
        """


def likely_worker(scheduler: Scheduler, placement: Placement, demand: JobDemand, now: float) -> str | None:
    """The worker that the first piece of `demand` would get now if no job came before it.

    Where none has room, the one that will be empty first; for a job with adapters, the one that should begin its loads.
    """
    alone = FairQueue()
    alone.join("", demand.piece(), SchedulingParams(), now)
    decided = scheduler.decide(alone, placement, now)
    if decided.placements:
        return decided.placements[0].worker
    if demand.adapters:
        return decided.loads[0].worker if decided.loads else None
    return placement.soonest(demand)


def room_for_any(line: RowQueue, placement: Placement) -> bool:
    """Return whether some worker could take a row of a model that jobs wait for."""
    return any(placement.has_room(JobDemand(*model, (ROW,))) for model in line.models)


@dataclass(frozen=True)
class QueueOrderScheduler:
    """Serves jobs in the order of the line.

    A job that no worker has room for, since its rows are to stay together or want a worker for themselves, lets later
    ones pass, but only :data:`MAX_PASSED` rows of them: then the worker that is empty first is kept for it. A job that
    waits although there is room, for a worker that is better for it, holds up no other: when that worker has room, the
    job is asked first. Interactive jobs come before batch jobs and never wait for them.

    Where adapters are needed, the likely worker of each of the first :data:`AHEAD` entries that wait is chosen anew
    every so often, as if those before it had theirs. It begins loading once their turn is near.
    """

    policy: Policy
    looked_at: int = LOOKED_AT
    spreads: bool = True
    """Rows of one job may go to several workers; else all go to one, as in the simulator's baselines."""
    loads_ahead: bool = True
    """Whether likely workers load while rows wait; not in baselines, which load when they get them."""

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`Scheduler`."""
        looks_at = line.looks_at if self.loads_ahead else None
        looks = looks_at is not None and looks_at <= now
        has_room = room_for_any(line, placement)
        if not (has_room or looks):  # nearly every message of a worker ends here while many jobs wait
            return SchedulingDecision(wake_at=looks_at)
        loads: tuple[PrefetchRequest, ...] = ()
        with placement.trial() as count:
            made = _DecisionBuilder(self, placement, count, now, len(line.models))
            entries = line.order(now)
            for entry in entries if has_room else ():
                if not made.serve(entry):
                    break
            if looks:
                loads = tuple(made.foresee(entries))
                line.looked(now)
                looks_at = now + LOOK_S
        changes_at = line.changes_at(now) if made.choosy or made.excluded else None
        wake_at = min((at for at in (changes_at, looks_at) if at is not None), default=None)
        return SchedulingDecision(tuple(made.placed), loads=loads, wake_at=wake_at)


@dataclass
class _DecisionBuilder:
    """A decision in the making."""

    rules: QueueOrderScheduler
    placement: Placement
    count: Callable[[str, str, JobDemand], None]
    now: float
    models: int
    """That jobs wait for."""
    placed: list[RowAssignment] = field(default_factory=list)
    choosy: Counter[str] = field(default_factory=Counter)
    """Jobs of each model that wait although there is room; a model with :data:`MAX_CHOOSY` is asked no more."""
    excluded: set[str] = field(default_factory=set)
    """Workers that are kept free."""
    reserved: dict[Key, CandidateWorker] = field(default_factory=dict)
    """The full workers that jobs with adapters wait for although others have room; later jobs count them there."""
    left: dict[str, Key] = field(default_factory=dict)
    """The first job of each model that finds no room, though there may be room for a row."""
    too_many: dict[tuple[str, frozenset[str]], int] = field(default_factory=dict)
    """How many rows of each model, and of some ControlNets, found no room together: jobs that ask for as many of these
    find none either."""

    def serve(self, entry: QueuedRows) -> bool:
        """Place as many of the rows as can be; False when no other job is to be asked."""
        model, rest, given = entry.demand.model_digest, entry, dict[str, list[int]]()
        if self.choosy[model] >= MAX_CHOOSY:
            return True
        passes, goes_on = self.left.get(model), True
        while True:
            whole = rest.asked(self.now)
            asked = whole.piece() if self.rules.spreads else whole
            if asked.rows >= self.too_many.get(_kind(asked), asked.rows + 1):
                break
            candidates = self.placement.candidates(asked, self.rules.looked_at, self.excluded, rest.fetching)
            chosen = self.rules.policy(candidates, asked)
            if chosen is None:
                goes_on = self._wait(rest, asked, candidates)
                break
            self.count(rest.job_id, chosen.instance, asked)
            rows = rest.rows[: asked.rows]
            given.setdefault(chosen.instance, []).extend(rows)
            if len(rows) == len(rest.rows):
                break
            rest = rest.without(rows)
        self.placed += (
            RowAssignment(entry.key, worker, tuple(rows), passes) for worker, rows in given.items()
        )
        return goes_on

    def foresee(self, entries: Sequence[QueuedRows]) -> Iterator[PrefetchRequest]:
        """Loads that should begin for those of `entries`, in the order of their turns, that wait for workers."""
        given = defaultdict[Key, list[int]](list)
        for placed in self.placed:
            given[placed.key] += placed.rows
        still = (entry for entry in entries if len(given[entry.key]) < len(entry.rows))
        waiting = list(islice(still, AHEAD))
        while waiting and not waiting[-1].demand.adapters:
            waiting.pop()
        for entry in waiting:
            rest = entry.without(given[entry.key]).asked(self.now)
            asked = rest.piece() if self.rules.spreads else rest
            best = self.reserved.get(entry.key) or self._wanted(
                self.placement.candidates(asked, self.rules.looked_at, (), entry.fetching), asked
            )
            if best is None:
                continue
            near = best.load_ms and best.prediction().begin_ms <= AHEAD_S * 1e3
            if near and best.instance not in entry.told:
                yield PrefetchRequest(entry.key, best.instance, asked)
            if entry.key not in self.reserved:
                self.count(entry.job_id, best.instance, rest)

    def _wanted(self, candidates: Sequence[CandidateWorker], asked: JobDemand) -> CandidateWorker | None:
        """The best worker, whether it has room now or not."""
        return self.rules.policy([c._replace(capacity_rows=ANY) for c in candidates], asked)

    def _wait(self, entry: QueuedRows, asked: JobDemand, candidates: Sequence[CandidateWorker]) -> bool:
        """Let `entry` wait; False when no other job is to be asked.

        Where it waits for a worker that holds its adapters, later jobs count it there: else each of many would wait for
        the same one.
        """
        model = asked.model_digest
        if self.placement.has_room(asked, self.excluded):
            self.choosy[model] += 1
            if asked.adapters and (best := self._wanted(candidates, asked)) is not None:
                self.reserved[entry.key] = best
                self.count(entry.job_id, best.instance, entry.asked(self.now))
            return sum(count >= MAX_CHOOSY for count in self.choosy.values()) < self.models
        if not asked.alone:
            self.too_many[_kind(asked)] = asked.rows
        if self.left.setdefault(model, entry.key) == entry.key and entry.passed >= MAX_PASSED:
            soonest = self.placement.soonest(asked, self.excluded)
            self.excluded |= {soonest} if soonest else set()
        return True


def _kind(demand: JobDemand) -> tuple[str, frozenset[str]]:
    """Return what tells the workers that can compute `demand`: its model and its ControlNets."""
    return demand.model_digest, frozenset(net.digest for net in demand.controls)


SOON_MS: Final = 1000.0
"""Rows that end within this time are waited for."""


def find_yielding_attempt(
    line: RowQueue, placement: Placement, claims: Mapping[Attempt, SchedulingParams], now: float
) -> Attempt | None:
    """An attempt that should go back to the line, since a tenant with fewer rows at the model's workers finds no room.

    Places of a model's workers are shared as in :class:`~giornata.shares.SharedPool`; of the tenant that has most, the
    attempt that began first gives way, so that its rows take turns. Interactive rows give way to batch jobs that have
    waited for :data:`AGEING_S`, and to no other ones. `claims` are those of the attempts at workers.
    """
    first: dict[str, QueuedRows] = {}
    for entry in line.order(now):
        first.setdefault(entry.claim.tenant, entry)
    if len(first.keys() | {claim.tenant for claim in claims.values()}) < 2:
        return None
    for tenant, entry in first.items():
        asked = entry.demand.piece()
        booked = {b.key: b for job, _ in claims for b in placement.assigned(job) if b.key in claims}
        here = {
            key: b.demand.rows for key, b in booked.items() if b.demand.model_digest == asked.model_digest
        }
        known = placement.least_ms(asked) > 0
        ends_ms = (placement.finish_ms(job) for job, _ in here) if known else ()
        if placement.has_room(asked) or any(ms is not None and ms < SOON_MS for ms in ends_ms):
            continue
        pool, gone, own = SharedPool(sum(here.values())), list[Attempt](), entry.claim
        urgent = own.priority is Priority.INTERACTIVE or now - entry.since_s >= AGEING_S
        for key, rows in here.items():
            other = claims[key]
            may_go = partial(bool, urgent or other.priority is Priority.BATCH)
            pool.take(
                TenantAllocation(other.tenant, other.weight, may_go, partial(gone.append, key)), rows, now
            )
        pool.take(TenantAllocation(tenant, own.weight), asked.rows, now)
        if gone:
            return gone[0]
    return None
