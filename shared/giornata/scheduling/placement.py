"""What is placed where: telemetry of the workers joined with assignments that it does not show yet. Pure.

Telemetry is up to a quarter of a second old, so a burst of jobs would all go to the same worker. An assignment
therefore counts from the moment it is made until the worker's telemetry lists it, and not after its end was reported,
though telemetry may list it still. If telemetry stops listing it and nobody reported its end, it was lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from giornata.fleet import Fleet
from giornata.scheduling.demand import Demand
from giornata.scheduling.estimates import Estimates
from giornata.scheduling.forecast import Prospect
from giornata.scheduling.occupancy import Attempt, Held, Occupancy, Served
from giornata.scheduling.policies import Candidate, Policy
from giornata.scheduling.repeats import Repeats
from giornata.scheduling.roster import Roster
from giornata.scheduling.weighing import Weighing
from giornata.wire.workers import ServiceState

UNLISTED_S: Final = 3.0
"""An assignment that its live worker does not list for this long is doubted: its report may have been lost."""
LOOKED_AT: Final = 16
"""Of many workers, a policy is asked about so many, those with least to compute, and about as many that have the
template.
"""

SAMPLED: Final = 64
"""Of many workers, how many a forecast is made of."""


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
        self._assignments: dict[Attempt, Assignment] = {}
        self._attempts: dict[str, set[int]] = {}
        """Of jobs: those that are assigned now."""
        self._workers: dict[str, Occupancy] = {}
        self._rosters: dict[Served, Roster] = {}

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry; assignments that it lists are alive."""
        self.fleet.observe(state, now)
        shown, name = state.worker, state.instance
        if shown is None:
            return
        digest = state.models[0].digest if state.models else ""
        self.estimates.observe(name, digest, shown.costs, shown.samples, shown.loads)
        before = self._workers.get(name)
        worker = Occupancy.of(state, shown, self.estimates.pace(name), before)
        worker.fetch_ms = self.estimates.fetch_ms(name, worker.disk_bytes)
        for job_id, attempt in worker.listed:
            assignment = self._assignments.get((job_id, attempt))
            if assignment and assignment.worker == name:
                self._assignments[job_id, attempt] = replace(assignment, listed_s=now)
                worker.unseen.pop((job_id, attempt), None)
        worker.stalled = self._is_stalled(worker)
        self._workers[name] = worker
        served = worker.served
        for model in served:
            self._roster(model).put(worker)
        for model in before.served if before else ():
            if model not in served:
                self._roster(model).drop(name)

    def expire(self, now: float) -> list[Assignment]:
        """Assignments of workers that fell silent or went away."""
        for gone in self.fleet.expire(now):
            worker = self._workers.pop(gone.instance, None)
            for model in worker.served if worker else ():
                self._roster(model).drop(gone.instance)
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
        return self._serving(demand).has_room(demand, excluded)

    def choose(
        self, demand: Demand, excluded: Collection[str] = (), fetching: str | None = None
    ) -> str | None:
        """The policy's worker for `demand`, or None while the job should wait.

        Args:
            demand: of a job.
            excluded: workers that are not asked.
            fetching: one that was told to read the job's template from disk, which is not waited for there.
        """
        candidates = self._candidates(demand, excluded)
        if fetching is not None:
            candidates = [c._replace(fetch_ms=0.0) if c.instance == fetching else c for c in candidates]
        chosen = self._policy(candidates, demand)
        return chosen.instance if chosen else None

    def soonest(self, demand: Demand, excluded: Collection[str] = ()) -> set[str]:
        """The worker that will be empty first, whether it has room now or not; an empty set if none serves `demand`."""
        return {worker.name for worker in self._serving(demand).least(1, excluded)}

    def prospects(self, demand: Demand) -> list[Prospect]:
        """Of workers that serve `demand`, however busy they are, and of which one knows how fast they are.

        Of many, some stand for others that have about as much to compute.
        """
        weigh = Weighing(demand)
        return [
            Prospect(worker.held.outlook.drained_ms, weigh.work_ms(worker), number)
            for worker, number in self._serving(demand).sample(SAMPLED)
            if worker.held is not None and worker.known
        ]

    def least_ms(self, demand: Demand) -> float:
        """That it takes where it is computed fastest, if nothing else is there; 0 where nobody knows."""
        weigh = Weighing(demand)
        known = (worker for worker in self._serving(demand).all() if worker.known)
        return min(map(weigh.alone_ms, known), default=0.0)

    def assigned(self, job_id: str) -> list[Assignment]:
        """Those of a job."""
        return [self._assignments[job_id, attempt] for attempt in self._attempts.get(job_id, ())]

    def finish_ms(self, job_id: str) -> float | None:
        """Until the rows of a job that have workers are computed, as of the latest telemetry; None where none has."""
        workers = {a.worker: worker for a in self.assigned(job_id) if (worker := self._workers.get(a.worker))}
        ends_ms: list[float] = []
        for worker in workers.values():
            held = worker.held or self._sum_up(worker)
            ends_ms += (
                end for end, owner in zip(held.outlook.ends_ms, held.owners, strict=True) if owner == job_id
            )
        return max(ends_ms, default=None)

    def worker(self, attempt: Attempt) -> str | None:
        """Who has an attempt now, if anybody has."""
        assignment = self._assignments.get(attempt)
        return assignment.worker if assignment else None

    def assign(self, job_id: str, attempt: int, worker: str, demand: Demand, now: float) -> None:
        """Count `demand` as on `worker` from now on, instead of what the attempt was assigned with before."""
        if demand.template is not None and job_id not in self._attempts:
            self._repeats.see(demand.template)
        self.release(job_id, attempt)
        self._assignments[job_id, attempt] = Assignment(job_id, attempt, worker, demand, now)
        self._attempts.setdefault(job_id, set()).add(attempt)
        known = self._workers.get(worker)
        if known is not None:
            known.give((job_id, attempt), demand)
            self._changed(known)

    def release(self, job_id: str, attempt: int) -> None:
        """The rows of this attempt are no longer on any worker."""
        assignment = self._assignments.pop((job_id, attempt), None)
        if assignment is None:
            return
        attempts = self._attempts[job_id]
        attempts.discard(attempt)
        if not attempts:
            del self._attempts[job_id]
        worker = self._workers.get(assignment.worker)
        if worker is not None:
            worker.take((job_id, attempt))
            self._changed(worker)

    def _changed(self, worker: Occupancy) -> None:
        for model in worker.served:
            self._roster(model).changed(worker.name)

    def _roster(self, model: Served) -> Roster:
        roster = self._rosters.get(model)
        if roster is None:
            roster = self._rosters[model] = Roster(self._sum_up)
        return roster

    def _serving(self, demand: Demand) -> Roster:
        return self._roster((demand.model, demand.model_digest))

    def _candidates(self, demand: Demand, excluded: Collection[str]) -> list[Candidate]:
        serving = self._serving(demand)
        many = len(serving) - len(excluded) > 2 * self._looked_at
        able = serving.least(self._looked_at, excluded, demand.template) if many else serving.all(excluded)
        weigh = Weighing(demand, self._repeats.share)
        return [weigh.candidate(worker) for worker in able]

    def _is_stalled(self, worker: Occupancy) -> bool:
        stepping_ms = worker.shown.stepping_ms
        if stepping_ms <= self._patience.least_ms:
            return False
        backlog = self._sum_up(worker).outlook.backlog
        step_ms = backlog.base_ms + sum(row.step_ms + row.first_ms for row in backlog.running)
        return stepping_ms > self._patience.factor * step_ms

    def _sum_up(self, worker: Occupancy) -> Held:
        return worker.sum_up(self.estimates.pace(worker.name), self._demanded(worker))

    def _demanded(self, worker: Occupancy) -> dict[Attempt, Demand]:
        """What jobs were assigned with of which their worker knows no more: their inputs are not there yet."""
        found = {}
        for key, rows in worker.listed.items():
            assignment = None if rows[0].text_tokens else self._assignments.get(key)
            if assignment and assignment.worker == worker.name:
                found[key] = assignment.demand
        return found
