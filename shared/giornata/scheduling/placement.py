"""Placement: telemetry of the workers joined with assignments that it does not show yet. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from giornata.fleet import Fleet, LastSeenTimes
from giornata.residency.use_based import HostTiers
from giornata.scheduling.adapters import ControlOffers, PendingAdapterLoads
from giornata.scheduling.cost_models import UNKNOWN, WorkerCostModels
from giornata.scheduling.demand import JobDemand, WorkerEstimate
from giornata.scheduling.policies import CandidateWorker, JobCostEstimator
from giornata.scheduling.worker_state import (
    AssignedAttempt,
    Attempt,
    Served,
    WorkerIndex,
    WorkerOccupancy,
    WorkerTotals,
)
from giornata.wire.workers import ServiceState, Tier


class StallTimeout(NamedTuple):
    """A worker is stalled whose step takes longer than `least_ms`, and than `factor` times its predicted time."""

    factor: float = 10.0
    least_ms: float = 10_000.0


SMOOTHING: Final = 0.02
"""Weight of the latest edit."""


class _EditCounts:
    """Counts edits by template; of `most` templates, the latest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[str, int] = OrderedDict()

    def count(self, template: str) -> int:
        """The number of edits of `template`, with the one that comes now."""
        count = self._counts[template] = self._counts.pop(template, 0) + 1
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        return count


class TemplateRunPolicy:
    """A template that comes a second time is worth a run.

    FlashPS's production trace (section 2) has 970 templates for 34 million requests: few templates come, and often.
    `edits` says which edit of a template, counted from 1, has it recorded; `served` says so where what an earlier edit
    left serves them, so that a run gains less.
    """

    def __init__(self, edits: int = 2, served: int = 4) -> None:
        self._least, self._served, self._edits = edits, served, _EditCounts(100_000)

    def see(self, template_id: str, *, registered: bool = False, served: bool = False) -> bool:
        """Count an edit that found no recording; return whether one is to be made: of a registered template, always."""
        count = self._edits.count(template_id)
        return registered or count >= (self._served if served else self._least)


class ReuseRate:
    """The rate at which pictures or LoRAs come again: where all are new, keeping one in one place is worth nothing.

    Where few pictures come again and again, as in FlashPS's production trace, one more hit is almost certain.
    """

    def __init__(self) -> None:
        self._edits = _EditCounts(10_000)
        self.share = 0.5
        """Share of recent edits whose picture or LoRA was used before; a half before the first edit."""

    def see(self, key: str) -> None:
        """Take in that an edit was placed whose template, or LoRA, has this key."""
        self.share += SMOOTHING * ((self._edits.count(key) > 1) - self.share)


SLACK: Final = 0.2
"""Share of its fastest rate that a lone worker gives up for fewer rows, which then end sooner, while no more wait."""
NEARLY: Final = 1.25
"""A slack that is off by less than this factor is left as it is."""


def slack_while(waiting: int, workers: int, most: float = SLACK) -> float:
    """The slack of `workers` while so many rows wait: it delays all behind the first, and those to come.

    One worker is full by chance; where all of several are, more rows will come, and it is half as much.
    """
    return most / (1 + max(0, waiting - 1) ** 3) if workers == 1 else most / (2 + 2 * waiting / workers)


class ModelSlack:
    """The slack of each model's workers, by how many of its rows wait; `most` is that of a lone idle worker."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._now: dict[Served, float] = {}
        self._workers = Counter[Served]()

    def count(self, models: Iterable[Served], workers: int) -> None:
        """Count so many more workers of each of `models`, or fewer."""
        for model in models:
            self._workers[model] += workers

    def heed(self, waiting: Mapping[Served, int]) -> set[Served]:
        """Take in how many rows of each model wait; the models whose slack has changed."""
        changed = set()
        for model in {*waiting, *self._now}:
            slack, before = self._while(model, waiting.get(model, 0)), self._of_model(model)
            if not before / NEARLY <= slack <= before * NEARLY:
                self._now[model] = slack
                changed.add(model)
        return changed

    def of(self, models: Iterable[Served]) -> float:
        """The slack of a worker of `models`: the least, since rows of any of them may go to it."""
        return min(map(self._of_model, models), default=self._most)

    def _of_model(self, model: Served) -> float:
        """The slack in force; until rows have waited, that of as many idle workers."""
        return self._now[model] if model in self._now else self._while(model, 0)

    def _while(self, model: Served, waiting: int) -> float:
        return slack_while(waiting, max(1, self._workers[model]), self._most)


# Telemetry is up to a quarter of a second old, so a burst of jobs would all go to the same worker. An
# assignment therefore counts from the moment it is made until the worker's telemetry lists it, and not
# after its end was reported, though telemetry may list it still. An assignment that telemetry stops listing
# before its end is reported was lost.


SAMPLED: Final = 32
"""How many of many workers a forecast looks at."""


class Placement:
    """The live fleet and the rows that were assigned to it from here.

    A worker gets no more rows once it computes them as fast as with all its places but for :class:`ModelSlack`.
    """

    def __init__(self, patience: StallTimeout | None = None, *, slack: float = SLACK) -> None:
        self._slacks = ModelSlack(slack)
        self.fleet = Fleet()
        self.estimates = WorkerCostModels()
        self._repeats, self._lora_repeats = ReuseRate(), ReuseRate()
        self._patience = patience or StallTimeout()
        self._bookings: dict[Attempt, AssignedAttempt] = {}
        self._listed = LastSeenTimes[Attempt]()
        """When a booking was made, or its worker listed it last."""
        self._attempts: dict[str, set[int]] = {}
        """The attempts of each job that are booked now."""
        self._workers: dict[str, WorkerOccupancy] = {}
        self._rosters: dict[Served, WorkerIndex] = {}
        self._refused: set[str] = set()
        self._host_tiers: HostTiers | None = None
        self._control_offers = ControlOffers()
        self._now = 0.0
        """The latest time that was told."""

    def observe(self, state: ServiceState, now: float) -> bool:
        """Take in telemetry; assignments that it lists are alive. Whether rows that wait may go to its worker."""
        self.fleet.observe(state, now)
        self._now = now
        self._refused.discard(state.instance)
        shown, name = state.worker, state.instance
        if state.control is not None:
            self._control_offers.observe(state)
        if shown is None:
            return False
        digest = state.models[0].digest if state.models else ""
        self.estimates.observe(name, digest, shown, state.controlnets)
        before = self._workers.get(name)
        worker = WorkerOccupancy.of(state, shown, self.estimates.pace(name), before)
        worker.controlnets = frozenset(card.digest for card in state.controlnets)
        worker.fetch_ms = self.estimates.fetch_ms(name, worker.disk_bytes)
        worker.arrivals = self.estimates.arrivals(name)
        worker.host_tiers = self._host_tiers
        worker.incoming.settle(worker.loras, now)
        for attempt in worker.listed:
            booking = self._bookings.get(attempt)
            if booking and booking.worker == name:
                self._listed.hear(attempt, now)
                worker.unseen.pop(attempt, None)
        worker.stalled = self._is_stalled(worker)
        self._workers[name] = worker
        served, left = worker.served, before.served if before else []
        self._slacks.count(left, -1)
        self._slacks.count(served, 1)
        for model in served:
            self._roster(model).put(worker)
        for model in left:
            if model not in served:
                self._roster(model).drop(name)
        return bool(served) and worker.rows < shown.capacity_rows

    def hosts(self, tiers: HostTiers) -> None:
        """Count what the host tiers of workers' machines hold as on their disks, from the next telemetry on."""
        self._host_tiers = tiers

    def listen(self, now: float) -> None:
        """Count silence from now on: nothing could be heard until now."""
        self.fleet.listen(now)
        self._listed.listen(now)

    def expire(self, now: float) -> list[AssignedAttempt]:
        """Bookings at workers that fell silent, or that were not heard for as long since the booking was made."""
        silent = {state.instance for state in self.fleet.expire(now)}
        for name in silent:
            self._control_offers.forget(name)
            worker = self._workers.pop(name, None)
            if worker is not None:
                self._slacks.count(worker.served, -1)
                for model in worker.served:
                    self._roster(model).drop(name)
            self.estimates.forget(name)
            self._refused.discard(name)
        return [
            booking
            for booking in self._bookings.values()
            if booking.worker in silent
            or (self.fleet.get(booking.worker) is None and self._listed.is_silent(booking.key, now))
        ]

    def unlisted(self) -> list[AssignedAttempt]:
        """Bookings that their worker tells of no longer though it is heard: the report of their end may be lost."""
        return [
            booking
            for booking in self._bookings.values()
            if (heard_s := self.fleet.heard_s(booking.worker)) is not None
            and self._listed.is_silent(booking.key, heard_s)
        ]

    def stalled(self) -> list[AssignedAttempt]:
        """Bookings at workers whose step has taken longer than patience allows; they get nothing until it ends."""
        names = {name for name, worker in self._workers.items() if worker.stalled}
        return [booking for booking in self._bookings.values() if booking.worker in names]

    def refuse(self, worker: str) -> None:
        """Give nothing to `worker`, which had no room, before its next telemetry."""
        self._refused.add(worker)

    def heed(self, waiting: Mapping[Served, int]) -> None:
        """Let workers have as many rows as are worth it while so many of each model wait in the line."""
        changed = self._slacks.heed(waiting)
        for worker in self._workers.values() if changed else ():
            if not changed.isdisjoint(worker.served):
                worker.limit(self._slacks.of(worker.served))
                self._changed(worker)

    def has_room(self, demand: JobDemand, excluded: Collection[str] = ()) -> bool:
        """Return whether a worker that is not `excluded` could take `demand` now, be it a good choice or not."""
        return self._serving(demand).has_room(demand, self._closed(demand, excluded))

    def candidates(
        self, demand: JobDemand, most: int, excluded: Collection[str] = (), fetching: str | None = None
    ) -> list[CandidateWorker]:
        """Workers for `demand`, busy or not.

        Of many, about `most` with least to compute, as many with its template and as many with its adapters. The
        template is not waited for on the worker that is `fetching` it.
        """
        serving, closed = self._serving(demand), self._closed(demand, excluded)
        many = len(serving) - len(closed) > 2 * most
        able = serving.fitting(demand, most, closed) if many else serving.all(closed)
        weigh = JobCostEstimator(demand, self._repeats.share, self._lora_repeats.share)
        return [weigh.candidate(worker, self._now, fetching=worker.name == fetching) for worker in able]

    def totals(self, name: str) -> WorkerTotals:
        """Everything that a worker has, summed up."""
        return self._sum_up(self._workers[name])

    def soonest(self, demand: JobDemand, excluded: Collection[str] = ()) -> str | None:
        """The worker that will be empty first, whether it has room now or not; None if none serves `demand`."""
        closed = self._lacking(demand).union(excluded)
        return next((worker.name for worker in self._serving(demand).least(1, closed)), None)

    def prospects(self, demand: JobDemand) -> list[WorkerEstimate]:
        """Workers that serve `demand` at a known speed; of many, some stand for others with as much to compute."""
        weigh = JobCostEstimator(demand)
        return [
            WorkerEstimate(worker.totals.outlook.drained_ms, weigh.among_ms(worker), number)
            for worker, number in self._sampled(demand)
            if worker.totals is not None and worker.pace is not UNKNOWN
        ]

    def least_ms(self, demand: JobDemand) -> float:
        """Time that `demand` takes alone on the fastest of the workers in a sample; 0 while no speed is known."""
        weigh = JobCostEstimator(demand)
        known = (worker for worker, _ in self._sampled(demand) if worker.pace is not UNKNOWN)
        return min(map(weigh.alone_ms, known), default=0.0)

    def adapters(self, worker: str) -> Mapping[str, Tier]:
        """The fastest tier of each adapter that a worker has, by digest; none where the worker is not known."""
        known = self._workers.get(worker)
        return {} if known is None else known.loras

    def assigned(self, job_id: str) -> list[AssignedAttempt]:
        """The bookings of a job."""
        return [self._bookings[job_id, attempt] for attempt in self._attempts.get(job_id, ())]

    def finish_ms(self, job_id: str) -> float | None:
        """Time until the rows of a job that have workers are computed, by the latest telemetry; None where none has."""
        workers = {b.worker: worker for b in self.assigned(job_id) if (worker := self._workers.get(b.worker))}
        ends_ms = (
            end_ms
            for totals in (worker.totals or self._sum_up(worker) for worker in workers.values())
            for end_ms, owner in zip(totals.outlook.ends_ms, totals.owners, strict=True)
            if owner == job_id
        )
        return max(ends_ms, default=None)

    def steps(self, job_id: str) -> dict[int, int]:
        """Steps computed of the rows of a job that workers list, by index."""
        known = ((booking.key, self._workers.get(booking.worker)) for booking in self.assigned(job_id))
        listed = (row for key, worker in known if worker for row in worker.listed.get(key, ()))
        return {row.index: row.step for row in listed}

    def worker(self, attempt: Attempt) -> str | None:
        """The worker that has an attempt now; None if none has."""
        booking = self._bookings.get(attempt)
        return booking.worker if booking else None

    def assign(self, job_id: str, attempt: int, worker: str, demand: JobDemand, now: float) -> None:
        """Count `demand` as on `worker` from now on, instead of what the attempt was assigned with before."""
        if job_id not in self._attempts:
            if demand.template is not None:
                self._repeats.see(demand.template)
            for lora in demand.adapters:
                self._lora_repeats.see(lora.digest)
        self.release(job_id, attempt)
        booking = AssignedAttempt((job_id, attempt), worker, demand)
        self._bookings[booking.key] = booking
        self._listed.hear(booking.key, now)
        self._attempts.setdefault(job_id, set()).add(attempt)
        self._now = now
        known = self._workers.get(worker)
        if known is not None:
            known.give(booking.key, demand, now)
            self._changed(known)

    def fetch(self, worker: str, demand: JobDemand, now: float) -> None:
        """A worker was told to load what `demand` needs, which it probably gets."""
        self._now = now
        if (known := self._workers.get(worker)) is not None:
            known.bring(demand, now)

    def release(self, job_id: str, attempt: int) -> None:
        """The rows of this attempt are no longer on any worker."""
        booking = self._bookings.pop((job_id, attempt), None)
        if booking is None:
            return
        self._listed.forget(booking.key)
        attempts = self._attempts[job_id]
        attempts.discard(attempt)
        if not attempts:
            del self._attempts[job_id]
        worker = self._workers.get(booking.worker)
        if worker is not None:
            worker.take(booking.key)
            self._changed(worker)

    @contextmanager
    def trial(self) -> Iterator[Callable[[str, str, JobDemand], None]]:
        """Inside, what is counted (job, worker, demand) is on its worker; on leaving, everything is as it was."""
        counted: list[tuple[WorkerOccupancy, Attempt]] = []
        before: dict[str, tuple[WorkerTotals | None, PendingAdapterLoads]] = {}

        def count(job_id: str, worker: str, demand: JobDemand) -> None:
            known, attempt = self._workers[worker], (job_id, -1 - len(counted))
            if worker not in before:
                before[worker], known.incoming = (known.totals, known.incoming), known.incoming.copy()
            counted.append((known, attempt))
            known.give(attempt, demand, self._now)
            self._changed(known)

        try:
            yield count
        finally:
            for known, attempt in counted:
                known.forget(attempt, *before[known.name])
                self._changed(known)

    def _closed(self, demand: JobDemand, excluded: Collection[str]) -> Collection[str]:
        closed = self._lacking(demand) | self._refused
        return closed.union(excluded) if closed else excluded

    def _lacking(self, demand: JobDemand) -> set[str]:
        """Workers that cannot have what `demand` needs.

        They lack ControlNets that no instance of the service computes for them. None where all do: it is refused there,
        and does not wait.
        """
        if not demand.controls:
            return set()
        needed = {net.digest for net in demand.controls}
        serving, offered = self._serving(demand).all(()), self._control_offers.has(needed)
        lacking = {
            worker.name
            for worker in serving
            if not (needed <= worker.controlnets or (offered and worker.shown.controlled is not None))
        }
        return lacking if len(lacking) < len(serving) else set()

    def _sampled(self, demand: JobDemand) -> list[tuple[WorkerOccupancy, float]]:
        """Workers that can compute `demand`; of many, some, and how many each of them stands for."""
        if lacking := self._lacking(demand):
            return [(worker, 1.0) for worker in self._serving(demand).all(lacking)]
        return self._serving(demand).sample(SAMPLED)

    def _changed(self, worker: WorkerOccupancy) -> None:
        for model in worker.served:
            self._roster(model).changed(worker.name)

    def _roster(self, model: Served) -> WorkerIndex:
        if model not in self._rosters:
            self._rosters[model] = WorkerIndex(self._sum_up)
        return self._rosters[model]

    def _serving(self, demand: JobDemand) -> WorkerIndex:
        return self._roster((demand.model, demand.model_digest))

    def _is_stalled(self, worker: WorkerOccupancy) -> bool:
        stepping_ms = worker.shown.stepping_ms
        if stepping_ms <= self._patience.least_ms:
            return False
        backlog = self._sum_up(worker).backlog  # the longest: each of its rows makes its first step
        step_ms = backlog.base_ms + sum(row.step_ms + row.first_ms for row in backlog.running)
        return stepping_ms > self._patience.factor * step_ms

    def _sum_up(self, worker: WorkerOccupancy) -> WorkerTotals:
        """Sum up a worker, with what was asked for by attempts that it has no inputs of yet."""
        demanded = {}
        for key, rows in worker.listed.items():
            booking = None if rows[0].shape_known else self._bookings.get(key)
            if booking and booking.worker == worker.name:
                demanded[key] = booking.demand
        return worker.sum_up(self.estimates.pace(worker.name), demanded, self._slacks.of(worker.served))
