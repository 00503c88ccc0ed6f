"""The cost of a job on several workers, and the choice among them by finish or deadline. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from giornata.residency.use_based import home_of
from giornata.scheduling.adapters import LoraLoadTimes
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import FinishEstimator, JobDemand, PlacementEstimate, RowLoad, StepTimeModel
from giornata.scheduling.pool_rows import PoolFinishEstimator, alone_ms, share_ms
from giornata.scheduling.worker_state import WorkerOccupancy
from giornata.wire.workers import Tier

LOAD_WEIGHT: Final = 1.0
"""What a millisecond of loading counts, in milliseconds of finishing later."""


class CandidateWorker(NamedTuple):
    """A worker that serves the job's model: what it has already, and where it has the job's template."""

    instance: str
    capacity_rows: int
    rows: int
    """Running, waiting and just assigned."""
    tokens: int
    """Image tokens that these rows compute: those of their masks, where they reuse."""
    outlook: FinishEstimator | PoolFinishEstimator
    loads: tuple[RowLoad, ...]
    """What the job's rows would add to steps of one device here."""
    template: Tier | None = None
    hit_saves_ms: float = 0.0
    """Time that later jobs like this one are expected to save if the template is recorded once and found again."""
    fetch_ms: float = 0.0
    """Time of reading the template, before the job's rows could begin on an idle worker."""
    wait_ms: float = 0.0
    """Time until all of the job's adapters are usable here, loads before theirs included; 0 where they are."""
    load_ms: float = 0.0
    """Time that new loads for the job take, each hop of each adapter, even where waiting for a place hides them."""
    needing_ms: float = 0.0
    """Time that the job's own steps that need its adapters take alone; told where they have to be waited for."""
    held: float = 0.0
    """Share of the job's LoRAs that are on the device here."""
    absent: tuple[tuple[str, float], ...] = ()
    """The job's LoRAs that are in none of this worker's tiers, each with the time that later jobs are expected to save
    if it comes to a worker once and is found there again."""
    joining: tuple[PoolRow, ...] = ()
    """The job's rows as those of this pool; empty for a worker with one device."""

    def prediction(self) -> PlacementEstimate:
        """Return what would become of this worker if it got the job; templates and adapters are loaded side by side."""
        if isinstance(self.outlook, PoolFinishEstimator):
            found = self.outlook.predict(self.joining, self.fetch_ms)
        else:
            found = self.outlook.predict(self.loads).ready_after(self.fetch_ms)
        return found.adapted_after(self.wait_ms, self.needing_ms)


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


Policy = Callable[[Sequence[CandidateWorker], JobDemand], CandidateWorker | None]
"""The chosen candidate, or None where the job waits: no worker has room, or the worker worth waiting for is full."""


def finish_time(
    candidates: Sequence[CandidateWorker], demand: JobDemand, load_weight: float = LOAD_WEIGHT
) -> CandidateWorker | None:
    """The worker where the job costs least: its own finish, and the delay of all other rows there.

    What loading its adapters takes of the links counts beside that, with `load_weight`, even where nobody waits for it:
    it delays later loads, and pushes out what others use.

    A virtual run of each worker tells both; a miss of the template costs what it costs there. A job whose template no
    worker has goes to the worker that the template's key names, unless that costs more than a later hit is expected to
    save: so templates are recorded once, and found again. LoRAs that no worker has are placed likewise, and among
    equals the worker is chosen that has more of the job's LoRAs. The job waits for a full worker where it still ends
    earlier than elsewhere.
    """
    settled = demand.template is None or any(c.template is not None for c in candidates)
    owner = None if settled else home_of((c.instance for c in candidates), demand.template or "")

    lora_homes = _homes(candidates)

    def cost(candidate: CandidateWorker) -> tuple[float, bool, float, str]:
        predicted = candidate.prediction()
        cost_ms = predicted.finish_ms + predicted.delay_ms + load_weight * candidate.load_ms
        for digest, saves_ms in candidate.absent if lora_homes else ():
            cost_ms += saves_ms if lora_homes.get(digest, candidate.instance) != candidate.instance else 0.0
        if owner is not None and candidate.instance != owner:
            cost_ms += candidate.hit_saves_ms
        full = not demand.fits(candidate.rows, candidate.capacity_rows)
        return cost_ms, full, candidate.wait_ms, candidate.instance

    best = min(candidates, key=cost, default=None)
    return best if best is not None and demand.fits(best.rows, best.capacity_rows) else None


def deadline_aware(
    candidates: Sequence[CandidateWorker], demand: JobDemand, load_weight: float = LOAD_WEIGHT
) -> CandidateWorker | None:
    """Among workers that finish in time, the one where most deadlines are kept, then where others are delayed least.

    A pool finishes in time where its rule keeps more deadlines with the job than without it: it breaks no promise for
    another one. `finish_time` where no worker does.
    """
    if demand.within_ms is None:
        return finish_time(candidates, demand, load_weight)
    able = [(c, c.prediction()) for c in with_room(candidates, demand)]
    timely = [(_gained(p, demand), c, p) for c, p in able if _gained(p, demand) > 0]
    if not timely:
        return finish_time(candidates, demand, load_weight)
    _, best, _ = min(timely, key=lambda of: (-of[0], of[2].delay_ms, of[2].finish_ms, of[1].instance))
    return best


def _gained(predicted: PlacementEstimate, demand: JobDemand) -> int:
    """Return how many more rows are in time with a job that has a deadline than without it."""
    if predicted.gained is not None:
        return predicted.gained
    return demand.rows if predicted.finish_ms <= (demand.within_ms or 0.0) else 0


class PolicyName(StrEnum):
    """The name of a policy in configurations."""

    FINISH_TIME = "finish_time"
    DEADLINE_AWARE = "deadline_aware"


POLICIES: Final[Mapping[PolicyName, Policy]] = MappingProxyType(
    {PolicyName.FINISH_TIME: finish_time, PolicyName.DEADLINE_AWARE: deadline_aware}
)


def with_room(candidates: Iterable[CandidateWorker], demand: JobDemand) -> list[CandidateWorker]:
    """The candidates that can take the job now."""
    return [c for c in candidates if demand.fits(c.rows, c.capacity_rows)]


def _homes(candidates: Sequence[CandidateWorker]) -> dict[str, str]:
    """The workers to which LoRAs go that no candidate has, by digest."""
    nowhere = {digest for candidate in candidates[:1] for digest, _ in candidate.absent}
    for candidate in candidates:
        if not nowhere:
            return {}
        nowhere.intersection_update([digest for digest, _ in candidate.absent])
    names = [candidate.instance for candidate in candidates]
    return {digest: owner for digest in nowhere if (owner := home_of(names, digest)) is not None}
