"""The cost of a job on several workers, as policies see it. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from giornata.scheduling.adapters import LoraLoadTimes
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import JobDemand, RowLoad, StepTimeModel
from giornata.scheduling.policies import CandidateWorker
from giornata.scheduling.pool_rows import alone_ms, share_ms
from giornata.scheduling.worker_state import WorkerOccupancy
from giornata.wire.workers import Tier


class _JobCost(NamedTuple):
    """The cost of a job at one pace, with its template at hand or without it."""

    loads: tuple[RowLoad, ...]
    work_ms: float
    """Sum over its rows, without the base of steps."""
    alone_ms: float
    """Time of all its rows where no other row is, on one device."""


class _WorkerAdapters(NamedTuple):
    """The adapters of the job at one worker; see :class:`giornata.scheduling.policies.CandidateWorker`."""

    wait_ms: float = 0.0
    load_ms: float = 0.0
    held: float = 0.0
    absent: tuple[tuple[str, float], ...] = ()


NONE: Final = _WorkerAdapters()
"""The adapters of a job that has none, at any worker."""


class JobCostEstimator:
    """Weighs one job on several workers; the cost of its rows is computed once for all workers of one pace."""

    def __init__(self, demand: JobDemand, repeats: float = 0.0, lora_repeats: float = 0.0) -> None:
        self._demand, self._repeats, self._lora_repeats = demand, repeats, lora_repeats
        self._costs: dict[int, tuple[_JobCost, _JobCost]] = {}
        self._nowhere: dict[int, _WorkerAdapters] = {}
        """By the arrivals of a kind: where none of the adapters is in any tier, and none on its way."""
        self._digests = frozenset(one.digest for one in demand.adapters)
        self._needing = demand.needing if demand.joins_within else 1.0

    def alone_ms(self, worker: WorkerOccupancy) -> float:
        """Time of all rows of the job there, where no other row is."""
        if worker.pool is not None:
            devices = worker.pool.devices
            return max(alone_ms(self._joining(worker)[0], devices), self.among_ms(worker))
        return self._here(worker).alone_ms

    def among_ms(self, worker: WorkerOccupancy) -> float:
        """Time that the job's rows take of a worker that always has others to compute."""
        if worker.pool is not None:
            return sum(share_ms(row, worker.pool.devices) for row in self._joining(worker))
        cost, share = self._here(worker), 1 / worker.shown.capacity_rows
        return share * worker.pace.base_ms * max(load.steps for load in cost.loads) + cost.work_ms

    def _here(self, worker: WorkerOccupancy) -> _JobCost:
        hit, miss = self._at(worker.pace)
        return hit if self._demand.template in worker.places else miss

    def _joining(self, worker: WorkerOccupancy) -> tuple[PoolRow, ...]:
        """The job's rows as those of a pool; none for a worker with one device."""
        return () if worker.pool is None else worker.pool.asked(self._demand, worker.places)

    def candidate(self, worker: WorkerOccupancy, now: float, *, fetching: bool = False) -> CandidateWorker:
        """The worker, which is summed up, as policies see it at `now`, in seconds.

        One that is `fetching` the job's template is not waited for: it was told so a while ago.
        """
        demand = self._demand
        hit, miss = self._at(worker.pace)
        template = worker.places.get(demand.template) if demand.template is not None else None
        there = self._adapters(worker, now) if demand.adapters else NONE
        own = miss if template is None else hit
        alone_ms = own.alone_ms if worker.pool is None or not there.wait_ms else self.alone_ms(worker)
        if worker.totals is None:
            raise ValueError(f"worker {worker.name} was not summed up")
        return CandidateWorker(
            worker.name,
            worker.totals.places,
            worker.totals.rows,
            worker.totals.tokens,
            worker.totals.outlook,
            loads=own.loads,
            template=template,
            hit_saves_ms=self._repeats * (miss.work_ms - hit.work_ms),
            fetch_ms=worker.fetch_ms if template is Tier.DISK and not fetching else 0.0,
            wait_ms=there.wait_ms,
            load_ms=there.load_ms,
            needing_ms=self._needing * alone_ms if there.wait_ms else 0.0,
            held=there.held,
            absent=there.absent,
            joining=self._joining(worker),
        )

    def _adapters(self, worker: WorkerOccupancy, now: float) -> _WorkerAdapters:
        """New loads begin, one after the other, when the worker has a lane for them; others go on beside them."""
        here, incoming, nowhere = worker.loras, worker.incoming, self._nowhere.get(id(worker.arrivals))
        if nowhere is None:
            nowhere = self._nowhere[id(worker.arrivals)] = self._arrives(worker.arrivals)
        lacks = here.keys().isdisjoint(self._digests) and incoming.lacks(self._digests)
        if lacks and not worker.host_has_any(self._digests):
            queue_ms = incoming.queue_ms(now)
            return nowhere._replace(wait_ms=queue_ms + nowhere.load_ms) if queue_ms else nowhere
        coming_ms = load_ms = 0.0
        needed, held, missing = self._demand.adapters, 0, list[tuple[str, float]]()
        for (digest, size_bytes), lacked in zip(needed, nowhere.absent, strict=True):
            tier = worker.tier_of(digest)
            if tier is Tier.DEVICE:
                held += 1
            elif (left_ms := incoming.left_ms(digest, now)) is not None:
                coming_ms = max(coming_ms, left_ms)
            else:
                load_ms += worker.arrivals.ms(size_bytes, tier)
                if tier is None:
                    missing.append(lacked)
        wait_ms = max(coming_ms, incoming.queue_ms(now) + load_ms) if load_ms else coming_ms
        return _WorkerAdapters(wait_ms, load_ms, held / len(needed), tuple(missing))

    def _arrives(self, arrivals: LoraLoadTimes) -> _WorkerAdapters:
        needed = self._demand.adapters
        load_ms = sum(arrivals.ms(one.size_bytes, None) for one in needed)
        absent = tuple((one.digest, self._lora_repeats * arrivals.repeated_ms(one)) for one in needed)
        return _WorkerAdapters(load_ms, load_ms, 0.0, absent)

    def _at(self, pace: StepTimeModel) -> tuple[_JobCost, _JobCost]:
        """The cost with the template at hand, and without it."""
        known = self._costs.get(id(pace))
        if known is None:
            known = self._costs[id(pace)] = self._cost(pace, reuses=True), self._cost(pace, reuses=False)
        return known

    def _cost(self, pace: StepTimeModel, *, reuses: bool) -> _JobCost:
        loads = self._demand.loads(pace, reuses=reuses)
        work_ms = sum(load.work_ms for load in loads)
        return _JobCost(loads, work_ms, pace.base_ms * max(load.steps for load in loads) + work_ms)
