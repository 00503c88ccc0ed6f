"""Choosing a worker for a job, by its predicted finish or its deadline, of one signature. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from giornata.residency.use_based import home_of
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import FinishEstimator, JobDemand, PlacementEstimate, RowLoad
from giornata.scheduling.pool_rows import PoolFinishEstimator
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
