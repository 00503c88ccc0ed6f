"""What is placed where: telemetry of the workers joined with assignments that it does not show yet. Pure.

Telemetry is up to a quarter of a second old, so a burst of jobs would all go to the same worker. An assignment
therefore counts from the moment it is made until the worker's telemetry lists it. If telemetry stops listing it
and nobody reported its end, it was lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from giornata.fleet import Fleet
from giornata.workers import ServiceName, ServiceState, WorkerState
from giornata_router.policy import Candidate, Demand, Policy, with_room

UNLISTED_S = 3.0
"""An assignment that its live worker does not list for this long is doubted: its report may have been lost."""


@dataclass(frozen=True)
class Assignment:
    """Rows of one attempt on one worker."""

    job_id: str
    attempt: int
    worker: str
    demand: Demand
    listed_s: float
    """When it was made, or last listed by the worker."""


@dataclass(frozen=True)
class _Listed:
    """What one telemetry message says a worker has, summed up once when it arrives."""

    attempts: frozenset[tuple[str, int]]
    """(job, attempt) of its rows."""
    rows: int
    tokens: int
    remaining_steps: int


class Placement:
    """The live fleet and the assignments made from here."""

    def __init__(self, policy: Policy) -> None:
        self.fleet = Fleet()
        self._policy = policy
        self._assignments: dict[str, Assignment] = {}
        self._listed: dict[str, _Listed] = {}

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry; assignments that it lists are alive."""
        self.fleet.observe(state, now)
        if state.worker is None:
            return
        listed = _listed(state.worker)
        self._listed[state.instance] = listed
        for assignment in self._on(state.instance):
            if (assignment.job_id, assignment.attempt) in listed.attempts:
                self._assignments[assignment.job_id] = _listed_at(assignment, now)

    def expire(self, now: float) -> list[Assignment]:
        """Assignments of workers that fell silent or went away."""
        for gone in self.fleet.expire(now):
            self._listed.pop(gone.instance, None)
        return [a for a in self._assignments.values() if self.fleet.get(a.worker) is None]

    def doubtful(self, now: float) -> list[Assignment]:
        """Assignments whose live worker has not listed them for a while."""
        return [
            a
            for a in self._assignments.values()
            if now - a.listed_s > UNLISTED_S and self.fleet.get(a.worker) is not None
        ]

    def choose(
        self, demand: Demand, excluded: Collection[str] = (), preferred: str | None = None
    ) -> str | None:
        """`preferred` if it has room, else the policy's worker for `demand`, or None while no worker has room."""
        candidates = self._candidates(demand, excluded)
        if preferred is not None and any(c.instance == preferred for c in with_room(candidates, demand)):
            return preferred
        chosen = self._policy(candidates, demand)
        return chosen.instance if chosen else None

    def soonest(self, demand: Demand, excluded: Collection[str] = ()) -> set[str]:
        """The worker that will be empty first, whether it has room now or not; an empty set if none serves `demand`."""
        candidates = self._candidates(demand, excluded)
        first = min(candidates, key=lambda c: (c.remaining_steps, c.instance), default=None)
        return {first.instance} if first else set()

    def attempt(self, job_id: str) -> int | None:
        """The attempt at a job that is assigned now, if any."""
        assignment = self._assignments.get(job_id)
        return assignment.attempt if assignment else None

    def assign(self, job_id: str, attempt: int, worker: str, demand: Demand, now: float) -> None:
        """Count `demand` as on `worker` from now on."""
        self._assignments[job_id] = Assignment(job_id, attempt, worker, demand, now)

    def release(self, job_id: str) -> None:
        """The job's rows are no longer on any worker."""
        self._assignments.pop(job_id, None)

    def _candidates(self, demand: Demand, excluded: Collection[str]) -> list[Candidate]:
        unseen = self._unseen()
        return [
            self._candidate(state, unseen.get(state.instance, []))
            for state in self.fleet.ready(ServiceName.DENOISER)
            if state.instance not in excluded and _serves(state, demand)
        ]

    def _on(self, worker: str) -> list[Assignment]:
        return [a for a in self._assignments.values() if a.worker == worker]

    def _unseen(self) -> dict[str, list[Demand]]:
        """Demands that were assigned but that no telemetry lists yet, by worker."""
        unseen: dict[str, list[Demand]] = {}
        for assignment in self._assignments.values():
            listed = self._listed.get(assignment.worker)
            if listed is None or (assignment.job_id, assignment.attempt) not in listed.attempts:
                unseen.setdefault(assignment.worker, []).append(assignment.demand)
        return unseen

    def _candidate(self, state: ServiceState, unseen: list[Demand]) -> Candidate:
        listed = self._listed.get(state.instance, _NOTHING)
        return Candidate(
            instance=state.instance,
            capacity_rows=state.worker.capacity_rows if state.worker else 0,
            rows=listed.rows + sum(d.rows for d in unseen),
            tokens=listed.tokens + sum(d.tokens for d in unseen),
            remaining_steps=listed.remaining_steps + sum(d.steps for d in unseen),
        )


_NOTHING = _Listed(frozenset(), 0, 0, 0)


def _listed(worker: WorkerState) -> _Listed:
    rows = worker.running + worker.waiting
    return _Listed(
        attempts=frozenset((row.job_id, row.attempt) for row in rows),
        rows=len(rows),
        tokens=sum(row.tokens for row in rows),
        remaining_steps=sum(row.steps - row.step for row in rows),
    )


def _listed_at(assignment: Assignment, now: float) -> Assignment:
    return Assignment(assignment.job_id, assignment.attempt, assignment.worker, assignment.demand, now)


def _serves(state: ServiceState, demand: Demand) -> bool:
    return any(card.name == demand.model and card.digest == demand.model_digest for card in state.models)
