"""What one job would cost on each of several workers. Pure."""

from __future__ import annotations

from giornata.scheduling.backlog import RowLoad
from giornata.scheduling.demand import Demand, Pace
from giornata.scheduling.occupancy import Occupancy
from giornata.scheduling.policies import Candidate
from giornata.wire.workers import Tier


class Weighing:
    """Makes candidates for one job; what its rows cost is computed once for all workers of one pace."""

    def __init__(self, demand: Demand, repeats: float = 0.0) -> None:
        self._demand, self._repeats = demand, repeats
        self._loads: dict[int, tuple[tuple[RowLoad, ...], tuple[RowLoad, ...], float]] = {}
        self._alone: dict[tuple[int, bool], tuple[float, float]] = {}

    def work_ms(self, worker: Occupancy) -> float:
        """Of all rows of the job there, as if steps cost nothing by themselves but for what the job has of them."""
        return self._ms(worker, 1 / worker.shown.capacity_rows)

    def alone_ms(self, worker: Occupancy) -> float:
        """Of all rows of the job there, if there are no others."""
        return self._ms(worker, 1.0)

    def _ms(self, worker: Occupancy, share: float) -> float:
        reuses = self._demand.template in worker.places
        key = id(worker.pace), reuses
        known = self._alone.get(key)
        if known is None:
            hit, miss, _ = self._on(worker.pace)
            loads = hit if reuses else miss
            base_ms = worker.pace.base_ms * max(load.steps for load in loads)
            known = self._alone[key] = base_ms, sum(load.work_ms for load in loads)
        return share * known[0] + known[1]

    def candidate(self, worker: Occupancy) -> Candidate:
        """As policies see it; `worker` is summed up."""
        demand = self._demand
        hit, miss, saved_ms = self._on(worker.pace)
        template = worker.places.get(demand.template) if demand.template is not None else None
        if worker.totals is None:
            raise ValueError(f"worker {worker.name} was not summed up")
        return Candidate(
            worker.name,
            worker.shown.capacity_rows,
            worker.totals.rows,
            worker.totals.tokens,
            worker.totals.outlook,
            loads=miss if template is None else hit,
            template=template,
            hit_saves_ms=self._repeats * saved_ms,
            fetch_ms=worker.fetch_ms if template is Tier.DISK else 0.0,
        )

    def _on(self, pace: Pace) -> tuple[tuple[RowLoad, ...], tuple[RowLoad, ...], float]:
        """With the template at hand, without, and what the one saves against the other."""
        known = self._loads.get(id(pace))
        if known is None:
            hit, miss = (self._demand.loads(pace, reuses=reuses) for reuses in (True, False))
            saved_ms = sum(load.work_ms for load in miss) - sum(load.work_ms for load in hit)
            known = self._loads[id(pace)] = hit, miss, saved_ms
        return known
