"""What is placed where: telemetry of the workers joined with assignments that it does not show yet. Pure.

Telemetry is up to a quarter of a second old, so a burst of jobs would all go to the same worker. An assignment
therefore counts from the moment it is made until the worker's telemetry lists it, and not after its end was reported,
though telemetry may list it still. If telemetry stops listing it and nobody reported its end, it was lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from operator import attrgetter
from typing import Final

from giornata.fleet import Fleet
from giornata.scheduling.backlog import Backlog, Outlook, RowLoad
from giornata.scheduling.demand import Demand, Pace, RowShape
from giornata.scheduling.estimates import UNKNOWN, Estimates
from giornata.scheduling.forecast import Prospect
from giornata.scheduling.policies import Candidate, Policy
from giornata.scheduling.repeats import Repeats
from giornata.workers import RowProgress, ServiceName, ServiceState, Tier, WorkerState

UNLISTED_S: Final = 3.0
"""An assignment that its live worker does not list for this long is doubted: its report may have been lost."""
LOOKED_AT: Final = 16
"""Of many workers, a policy is asked about so many, those with least to compute, and about as many that have the
template.
"""

Attempt = tuple[str, int]
"""Job and attempt."""
Served = tuple[str, str]
"""Name and digest of a model."""


@dataclass(frozen=True)
class Patience:
    """How long a step may take before its worker counts as stalled: longer than both."""

    factor: float = 10.0
    """Of the predicted time."""
    least_ms: float = 10_000.0


@dataclass(frozen=True)
class Assignment:
    """Rows of one attempt on one worker."""

    job_id: str
    attempt: int
    worker: str
    demand: Demand
    listed_s: float
    """When it was made, or last listed by the worker."""


@dataclass(slots=True)
class _Worker:
    """One worker, as far as choosing it depends on it."""

    state: ServiceState
    shown: WorkerState
    listed: dict[Attempt, list[RowProgress]]
    """Of the latest telemetry."""
    places: dict[str, Tier]
    """Templates that it has."""
    fetch_ms: float = 0.0
    """Of reading one of them from disk."""
    unseen: dict[str, Demand] = field(default_factory=dict)
    """By job: assigned, and not listed yet."""
    ended: set[Attempt] = field(default_factory=set)
    """Reported, and listed still."""
    loads: dict[str, tuple[RowLoad, ...]] = field(default_factory=dict)
    """By job: of what is listed and unseen, with the present pace; a new message begins anew."""
    outlook: Outlook | None = None
    """Of what is listed and unseen; None once that has changed."""
    pace: Pace = UNKNOWN
    """What the outlook was made with."""
    owners: tuple[str, ...] = ()
    """Jobs of the outlook's rows."""
    rows: int = 0
    tokens: int = 0
    work_ms: float = 0.0
    stalled: bool = False


class Placement:
    """The live fleet and the assignments made from here.

    Args:
        policy: chooses among workers.
        looked_at: of many workers, how many the policy is asked about.
        patience: with a step that does not end.
    """

    def __init__(
        self, policy: Policy, *, looked_at: int = LOOKED_AT, patience: Patience | None = None
    ) -> None:
        self.fleet = Fleet()
        self.estimates = Estimates()
        self._repeats = Repeats()
        self._policy = policy
        self._looked_at = looked_at
        self._patience = patience or Patience()
        self._assignments: dict[str, Assignment] = {}
        self._workers: dict[str, _Worker] = {}
        self._serving: dict[Served, dict[str, _Worker]] = {}
        """Workers that take rows now, by model."""

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry; assignments that it lists are alive."""
        self.fleet.observe(state, now)
        shown = state.worker
        if shown is None:
            return
        digest = state.models[0].digest if state.models else ""
        self.estimates.observe(state.instance, digest, shown.costs, shown.samples, shown.loads)
        listed: dict[Attempt, list[RowProgress]] = {}
        for row in shown.running + shown.waiting:
            listed.setdefault((row.job_id, row.attempt), []).append(row)
        fetch_ms = self.estimates.fetch_ms(state.instance, _disk_bytes(shown))
        worker = _Worker(state, shown, listed, _places(shown), fetch_ms)
        before = self._workers.get(state.instance)
        if before is not None:
            worker.ended = before.ended & listed.keys()
            worker.unseen = before.unseen
        for job_id, attempt in listed:
            assignment = self._assignments.get(job_id)
            if assignment and (assignment.attempt, assignment.worker) == (attempt, state.instance):
                self._assignments[job_id] = replace(assignment, listed_s=now)
                worker.unseen.pop(job_id, None)
        worker.stalled = self._is_stalled(worker)
        self._keep(worker, before)

    def expire(self, now: float) -> list[Assignment]:
        """Assignments of workers that fell silent or went away."""
        for gone in self.fleet.expire(now):
            self._keep(None, self._workers.pop(gone.instance, None))
            self.estimates.forget(gone.instance)
        return [a for a in self._assignments.values() if self.fleet.get(a.worker) is None]

    def doubtful(self, now: float) -> list[Assignment]:
        """Assignments whose live worker has not listed them for a while."""
        return [
            a
            for a in self._assignments.values()
            if now - a.listed_s > UNLISTED_S and self.fleet.get(a.worker) is not None
        ]

    def stalled(self) -> list[Assignment]:
        """Assignments of workers whose step has taken longer than patience allows; they get nothing until it ends."""
        names = {name for name, worker in self._workers.items() if worker.stalled}
        return [a for a in self._assignments.values() if a.worker in names] if names else []

    def has_room(self, demand: Demand, excluded: Collection[str] = ()) -> bool:
        """Whether any worker could take it now, be it a good choice or not."""
        return any(
            worker.rows == 0 or (not demand.alone and worker.rows + demand.rows <= worker.shown.capacity_rows)
            for worker in self._able(demand, excluded)
        )

    def choose(
        self, demand: Demand, excluded: Collection[str] = (), preferred: str | None = None
    ) -> str | None:
        """`preferred` if it has room, else the policy's worker for `demand`, or None while the job should wait."""
        able = self._serving.get((demand.model, demand.model_digest), {})
        if preferred in able and preferred not in excluded:
            worker = able[preferred]
            if worker.outlook is None:
                self._sum_up(worker)
            if _Weighing(demand).candidate(worker).has_room(demand):
                return preferred
        chosen = self._policy(self._candidates(demand, excluded), demand)
        return chosen.instance if chosen else None

    def soonest(self, demand: Demand, excluded: Collection[str] = ()) -> set[str]:
        """The worker that will be empty first, whether it has room now or not; an empty set if none serves `demand`."""
        able = self._able(demand, excluded)
        first = min(able, key=lambda w: (w.work_ms, w.state.instance), default=None)
        return {first.state.instance} if first else set()

    def prospects(self, demand: Demand) -> list[Prospect]:
        """Of every worker that serves `demand`, however busy it is, and of which one knows how fast it is."""
        weigh = _Weighing(demand)
        return [
            Prospect(max(worker.outlook.ends_ms, default=0.0), weigh.work_ms(worker))
            for worker in self._able(demand, ())
            if worker.outlook is not None and worker.pace is not UNKNOWN
        ]

    def finish_ms(self, job_id: str) -> float | None:
        """Until a job's rows are computed, as of its worker's latest telemetry; None where none has it."""
        assignment = self._assignments.get(job_id)
        worker = self._workers.get(assignment.worker) if assignment else None
        if worker is None:
            return None
        outlook = worker.outlook or self._sum_up(worker)
        owners = worker.owners
        return max(
            (end for end, owner in zip(outlook.ends_ms, owners, strict=True) if owner == job_id), default=None
        )

    def attempt(self, job_id: str) -> int | None:
        """The attempt at a job that is assigned now, if any."""
        assignment = self._assignments.get(job_id)
        return assignment.attempt if assignment else None

    def assign(self, job_id: str, attempt: int, worker: str, demand: Demand, now: float) -> None:
        """Count `demand` as on `worker` from now on."""
        self.release(job_id)
        if demand.template is not None:
            self._repeats.see(demand.template)
        self._assignments[job_id] = Assignment(job_id, attempt, worker, demand, now)
        known = self._workers.get(worker)
        if known is not None and (job_id, attempt) not in known.listed:
            known.unseen[job_id] = demand
            known.outlook = None

    def release(self, job_id: str) -> None:
        """The job's rows are no longer on any worker."""
        assignment = self._assignments.pop(job_id, None)
        worker = self._workers.get(assignment.worker) if assignment else None
        if assignment is None or worker is None:
            return
        worker.unseen.pop(job_id, None)
        worker.loads.pop(job_id, None)
        if (job_id, assignment.attempt) in worker.listed:
            worker.ended.add((job_id, assignment.attempt))
        worker.outlook = None

    def _keep(self, worker: _Worker | None, before: _Worker | None) -> None:
        """`worker` in the place of what it was before."""
        if before is not None:
            for served in _served(before.state):
                self._serving[served].pop(before.state.instance, None)
        if worker is not None:
            self._workers[worker.state.instance] = worker
            for served in () if worker.stalled else _served(worker.state):
                self._serving.setdefault(served, {})[worker.state.instance] = worker

    def _able(self, demand: Demand, excluded: Collection[str]) -> list[_Worker]:
        """Workers that serve it, their sums up to date."""
        serving = self._serving.get((demand.model, demand.model_digest), {})
        able = (
            [worker for name, worker in serving.items() if name not in excluded]
            if excluded
            else [*serving.values()]
        )
        for worker in able:
            if worker.outlook is None:
                self._sum_up(worker)
        return able

    def _candidates(self, demand: Demand, excluded: Collection[str]) -> list[Candidate]:
        able = self._able(demand, excluded)
        if len(able) > 2 * self._looked_at:
            able = self._worth_a_look(able, demand.template)
        weigh = _Weighing(demand, self._repeats.share)
        return [weigh.candidate(worker) for worker in able]

    def _worth_a_look(self, able: list[_Worker], template: str | None) -> list[_Worker]:
        """Those with least to compute, among all and among those with the template."""
        nearest = nsmallest(self._looked_at, able, _work_ms)
        if template is None:
            return nearest
        having = [worker for worker in able if template in worker.places]
        near = {id(worker) for worker in nearest}
        return nearest + [w for w in nsmallest(self._looked_at, having, _work_ms) if id(w) not in near]

    def _is_stalled(self, worker: _Worker) -> bool:
        stepping_ms = worker.shown.stepping_ms
        if stepping_ms <= self._patience.least_ms:
            return False
        backlog = self._sum_up(worker).backlog
        step_ms = backlog.base_ms + sum(row.step_ms + row.first_ms for row in backlog.running)
        return stepping_ms > self._patience.factor * step_ms

    def _sum_up(self, worker: _Worker) -> Outlook:
        """What the worker has, from what is listed and unseen."""
        pace = self.estimates.pace(worker.state.instance)
        if pace is not worker.pace:
            worker.pace = pace
            worker.loads.clear()
        loads: list[RowLoad] = []
        owners: list[str] = []
        worker.tokens = 0
        for key, rows in worker.listed.items():
            if key in worker.ended:
                continue
            known = worker.loads.get(key[0])
            if known is None:
                known = worker.loads[key[0]] = self._loads_of_listed(rows, worker)
            loads += known
            owners += [key[0]] * len(known)
            worker.tokens += sum(row.tokens for row in rows)
        for job_id, demand in worker.unseen.items():
            known = worker.loads.get(job_id)
            if known is None:
                known = worker.loads[job_id] = self._loads(demand, worker)
            loads += known
            owners += [job_id] * len(known)
            worker.tokens += demand.tokens
        worker.owners = tuple(owners)
        worker.rows = len(loads)
        worker.work_ms = sum(load.work_ms for load in loads)
        places = worker.shown.capacity_rows
        backlog = Backlog(places, pace.base_ms, running=tuple(loads[:places]), waiting=tuple(loads[places:]))
        worker.outlook = Outlook(backlog)
        return worker.outlook

    def _loads_of_listed(self, rows: list[RowProgress], worker: _Worker) -> tuple[RowLoad, ...]:
        asked = self._demanded(rows[0], worker)
        return tuple(_load(row, worker.pace) for row in rows) if asked is None else self._loads(asked, worker)

    def _demanded(self, row: RowProgress, worker: _Worker) -> Demand | None:
        """What a row was assigned with, where its worker knows no more of it: its inputs are not there yet."""
        assignment = None if row.text_tokens else self._assignments.get(row.job_id)
        if assignment is None or (assignment.attempt, assignment.worker) != (
            row.attempt,
            worker.state.instance,
        ):
            return None
        return assignment.demand

    @staticmethod
    def _loads(demand: Demand, worker: _Worker) -> tuple[RowLoad, ...]:
        return demand.loads(worker.pace, reuses=demand.template in worker.places)


class _Weighing:
    """Makes candidates for one job; what its rows cost is computed once for all workers of one pace."""

    def __init__(self, demand: Demand, repeats: float = 0.0) -> None:
        self._demand, self._repeats = demand, repeats
        self._loads: dict[int, tuple[tuple[RowLoad, ...], tuple[RowLoad, ...], float]] = {}

    def work_ms(self, worker: _Worker) -> float:
        """Of all rows of the job there, as if steps cost nothing by themselves."""
        candidate = self.candidate(worker)
        base_ms = candidate.outlook.backlog.base_ms * max(load.steps for load in candidate.loads)
        return base_ms / candidate.capacity_rows + sum(load.work_ms for load in candidate.loads)

    def candidate(self, worker: _Worker) -> Candidate:
        demand = self._demand
        known = self._loads.get(id(worker.pace))
        if known is None:
            hit, miss = (demand.loads(worker.pace, reuses=reuses) for reuses in (True, False))
            saved_ms = sum(load.work_ms for load in miss) - sum(load.work_ms for load in hit)
            known = self._loads[id(worker.pace)] = hit, miss, saved_ms
        hit, miss, saved_ms = known
        template = worker.places.get(demand.template) if demand.template is not None else None
        if worker.outlook is None:
            raise ValueError(f"worker {worker.state.instance} was not summed up")
        return Candidate(
            worker.state.instance,
            worker.shown.capacity_rows,
            worker.rows,
            worker.tokens,
            worker.outlook,
            loads=miss if template is None else hit,
            template=template,
            hit_saves_ms=self._repeats * saved_ms,
            fetch_ms=worker.fetch_ms if template is Tier.DISK else 0.0,
        )


_work_ms = attrgetter("work_ms")


def _places(shown: WorkerState) -> dict[str, Tier]:
    """A template that is in both tiers is in memory."""
    return {key: tier for tier in (Tier.DISK, Tier.MEMORY) for key in shown.resident.get(tier, ())}


def _disk_bytes(shown: WorkerState) -> float:
    """Of a template on disk, on average over those that are listed."""
    count = len(shown.resident.get(Tier.DISK, ()))
    return shown.templates.disk_bytes / count if shown.templates is not None and count else 0.0


def _load(row: RowProgress, pace: Pace) -> RowLoad:
    computed = row.tokens if row.computed_tokens is None else row.computed_tokens
    shape = RowShape(
        row.text_tokens, row.tokens, computed, max(1, row.steps - row.step), row.sequences, row.begun
    )
    return shape.load(pace, reuses=computed < row.tokens)


def _served(state: ServiceState) -> list[Served]:
    """Models that it takes rows of now."""
    ready = state.ready and state.active and not state.draining and state.service is ServiceName.DENOISER
    return [(card.name, card.digest) for card in state.models] if ready else []
