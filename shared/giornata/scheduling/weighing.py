"""What a job would cost on several workers, as policies see it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from giornata.scheduling.backlog import RowLoad
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import Demand, Pace
from giornata.scheduling.occupancy import Occupancy
from giornata.scheduling.policies import Candidate
from giornata.scheduling.pool_outlook import alone_ms, share_ms
from giornata.wire.workers import Tier


class _Cost(NamedTuple):
    """What a job costs at one pace, with its template at hand or without it."""

    loads: tuple[RowLoad, ...]
    work_ms: float
    """Sum over its rows, without the base of steps."""


class _Arriving(NamedTuple):
    """A LoRA of the job, on workers of one kind."""

    digest: str
    ms: Mapping[Tier | None, float]
    """Time until it is usable, by the fastest tier that has it."""
    saves_ms: float
    """Time that later jobs are expected to save if it comes once and stays."""


class Weighing:
    """Weighs one job on several workers; the cost of its rows is computed once for all workers of one pace."""

    def __init__(self, demand: Demand, repeats: float = 0.0, lora_repeats: float = 0.0) -> None:
        self._demand, self._repeats, self._lora_repeats = demand, repeats, lora_repeats
        self._costs: dict[int, tuple[_Cost, _Cost]] = {}
        self._arriving: dict[int, list[_Arriving]] = {}

    def alone_ms(self, worker: Occupancy) -> float:
        """Time of all rows of the job there, where no other row is."""
        if worker.pool is not None:
            devices = worker.pool.devices
            return max(alone_ms(self._joining(worker)[0], devices), self.among_ms(worker))
        return self._ms(worker, 1.0)

    def among_ms(self, worker: Occupancy) -> float:
        """Time that the job's rows take of a worker that always has others to compute."""
        if worker.pool is not None:
            return sum(share_ms(row, worker.pool.devices) for row in self._joining(worker))
        return self._ms(worker, 1 / worker.shown.capacity_rows)

    def _ms(self, worker: Occupancy, share: float) -> float:
        """Time of all rows of the job, with its `share` of the base of steps."""
        hit, miss = self._at(worker.pace)
        cost = hit if self._demand.template in worker.places else miss
        return share * worker.pace.base_ms * max(load.steps for load in cost.loads) + cost.work_ms

    def _joining(self, worker: Occupancy) -> tuple[PoolRow, ...]:
        """The job's rows as those of a pool; none for a worker with one device."""
        return () if worker.pool is None else worker.pool.asked(self._demand, worker.places)

    def candidate(self, worker: Occupancy, now: float, *, fetching: bool = False) -> Candidate:
        """The worker, which is summed up, as policies see it at `now`, in seconds.

        One that is `fetching` the job's template is not waited for: it was told so a while ago.
        """
        demand = self._demand
        hit, miss = self._at(worker.pace)
        template = worker.places.get(demand.template) if demand.template is not None else None
        wait_ms, load_ms, absent = self._adapters(worker, now) if demand.adapters else (0.0, 0.0, ())
        if worker.totals is None:
            raise ValueError(f"worker {worker.name} was not summed up")
        return Candidate(
            worker.name,
            worker.totals.places,
            worker.totals.rows,
            worker.totals.tokens,
            worker.totals.outlook,
            loads=miss.loads if template is None else hit.loads,
            template=template,
            hit_saves_ms=self._repeats * (miss.work_ms - hit.work_ms),
            fetch_ms=worker.fetch_ms if template is Tier.DISK and not fetching else 0.0,
            wait_ms=wait_ms,
            load_ms=load_ms,
            needing_ms=demand.needing * self.alone_ms(worker) if wait_ms else 0.0,
            held=self._held(worker),
            absent=absent,
            joining=self._joining(worker),
        )

    def _held(self, worker: Occupancy) -> float:
        """Share of the job's LoRAs on the device there."""
        needed = self._demand.adapters
        if not needed:
            return 0.0
        return sum(worker.loras.get(lora.digest) is Tier.DEVICE for lora in needed) / len(needed)

    def _adapters(self, worker: Occupancy, now: float) -> tuple[float, float, tuple[tuple[str, float], ...]]:
        """When the job's adapters are usable there, how long new loads would take, and what it lacks.

        New loads begin, one after the other, when the worker has a lane for them; others go on beside them. Each that
        is in none of the worker's tiers comes with what later jobs save.
        """
        known = self._arriving.get(id(worker.arrivals))
        if known is None:
            known = [
                _Arriving(
                    lora.digest,
                    {tier: worker.arrivals.ms(lora.size_bytes, tier) for tier in (None, *Tier)},
                    self._lora_repeats * worker.arrivals.repeated_ms(lora),
                )
                for lora in self._demand.adapters
            ]
            self._arriving[id(worker.arrivals)] = known
        coming_ms = load_ms = 0.0
        absent = list[tuple[str, float]]()
        for digest, ms, saves_ms in known:
            tier, left_ms = worker.tier_of(digest), worker.incoming.left_ms(digest, now)
            if tier is None and left_ms is None:
                absent.append((digest, saves_ms))
            if tier is Tier.DEVICE:
                continue
            if left_ms is None:
                load_ms += ms[tier]
            else:
                coming_ms = max(coming_ms, left_ms)
        wait_ms = max(coming_ms, worker.incoming.queue_ms(now) + load_ms) if load_ms else coming_ms
        return wait_ms, load_ms, tuple(absent)

    def _at(self, pace: Pace) -> tuple[_Cost, _Cost]:
        """The cost with the template at hand, and without it."""
        known = self._costs.get(id(pace))
        if known is None:
            known = self._costs[id(pace)] = self._cost(pace, reuses=True), self._cost(pace, reuses=False)
        return known

    def _cost(self, pace: Pace, *, reuses: bool) -> _Cost:
        loads = self._demand.loads(pace, reuses=reuses)
        return _Cost(loads, sum(load.work_ms for load in loads))
