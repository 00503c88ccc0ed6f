"""Cost models of steps and loads, learnt from telemetry. Pure.

Every model and device has one regression (FlashPS, EuroSys '26, section 4.4), and one more for each way in which a pool
spreads a step over devices: each is begun from the profile of the worker that tells it first, and refitted with
forgetting to the steps of its own way. Every worker has a slowness, so that a host that is throttled or shared is
known for it. A worker of a known kind is predicted from its first moment. With every step a worker tells how much
longer its planner expected loads to make it; its next steps are expected to be as much longer. A regression takes every
step in while its kind has few workers, and an even share of the steps where it has many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from giornata.planning.cost_model import ALONE, CostModel, StepParallelism, nnls_solver
from giornata.planning.operations import NetworkOperations, StepCosts, StepWork
from giornata.planning.operations import work_of as control_work_of
from giornata.scheduling.adapters import LoraLoadTimes, UnitTime
from giornata.scheduling.demand import StepTimeModel
from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata.wire.workers import ModelDeviceCosts, StepSample, Tier, WorkerCosts, WorkerState

SMOOTHING: Final = 0.1
"""Weight of the latest step in the running mean of how much slower a worker is."""
UNKNOWN: Final = StepTimeModel()
"""The pace of a worker that has not told what its steps cost."""
UNTOLD: Final = LoraLoadTimes()
"""How long LoRAs take to come to a worker that has not told what its steps cost."""
SLOWEST: Final = 8.0
"""A single step counts as at most this many times slower, or faster, than predicted: page faults say little."""
TOLD: Final = 0.02
"""A worker's pace follows its slowness where they differ by more than this share."""
TEACHERS: Final = 4
"""Up to this number of workers teach a regression every step. More workers teach it as many steps together as these."""


@dataclass(slots=True)
class _Worker:
    kind: _ModelDeviceEstimator
    operations: NetworkOperations
    reused: BlockMode
    renewed_every: int
    keeps_padding: bool
    ways: frozenset[StepParallelism] = frozenset()
    """In which it spreads steps over several devices."""
    controls: tuple[tuple[str, ControlWork], ...] = ()
    """Digests and work of ControlNets in its process."""
    slowness: float = 1.0
    told: float = 1.0
    """The slowness of its pace: it follows in steps, since all costs at the worker are computed again at each."""
    excess: UnitTime = field(default_factory=UnitTime)
    """Time by which loads lengthen steps, per millisecond of the least computing of rows that reuse."""

    def stepped(self, samples: Iterable[StepSample]) -> None:
        """Take in its latest steps."""
        for sample in samples:
            if not sample.rows:
                continue
            if sample.reusing_ms:
                self.excess.observe(sample.reusing_ms, sample.excess_ms)
            if sample.waited_ms == 0:  # else part of it was waiting for loads
                self.slowness = self.kind.step(sample, self.slowness)


class WorkerCostModels:
    """Steps and loads of every worker; feed it all telemetry of denoisers."""

    def __init__(self) -> None:
        nnls_solver()  # loaded here, not when the first worker tells what its steps cost
        self._kinds: dict[tuple[str, str], _ModelDeviceEstimator] = {}
        """By a model's digest and a device."""
        self._networks: dict[str, tuple[tuple[BlockSpec, ...], NetworkOperations]] = {}
        """By a model's digest: the blocks that its workers tell, and what these compute."""
        self._workers: dict[str, _Worker] = {}

    def observe(
        self, instance: str, model_digest: str, shown: WorkerState, controlnets: Iterable[ControlCard] = ()
    ) -> None:
        """Take in a worker's telemetry; `controlnets` are those in its process.

        Without a cost model, or before any worker has told the model's blocks, it holds nothing that can be used.
        """
        operations, costs = self._network(model_digest, shown.blocks), shown.cost_model
        if costs is None or operations is None:
            return
        kind = self._kinds.get((model_digest, costs.device))
        if kind is None:
            kind = self._kinds[model_digest, costs.device] = _ModelDeviceEstimator(costs)
        worker = self._workers.get(instance)
        if worker is None or worker.kind is not kind or worker.operations is not operations:
            self.forget(instance)
            worker = _Worker(kind, operations, costs.reused, costs.renewed_every, costs.keeps_padding)
            self._workers[instance] = worker
            kind.workers += 1
        worker.ways = kind.ways_of(costs)
        worker.controls = tuple(
            (card.digest, control_work_of(card)) for card in sorted(controlnets, key=lambda card: card.digest)
        )
        worker.stepped(shown.samples)
        kind.loaded(shown)

    def forget(self, instance: str) -> None:
        """The worker is gone; what its kind costs stays known."""
        gone = self._workers.pop(instance, None)
        if gone is not None:
            gone.kind.workers -= 1

    def _network(self, model_digest: str, told: tuple[BlockSpec, ...] | None) -> NetworkOperations | None:
        """Return what the blocks of a model compute, as they are told now or were before; None before."""
        known = self._networks.get(model_digest)
        if told and (known is None or (told is not known[0] and told != known[0])):
            known = self._networks[model_digest] = told, NetworkOperations(told)
        return None if known is None else known[1]

    def pace(self, instance: str) -> StepTimeModel:
        """The pace of a worker; the same object for workers of one kind that are equally slow."""
        worker = self._workers.get(instance)
        if worker is None:
            return UNKNOWN
        if abs(worker.slowness - worker.told) > TOLD * worker.told:
            worker.told = round(worker.slowness, 2)
        loading = round(1 + worker.excess.ms(1.0), 2)
        return worker.kind.pace(worker, loading)

    def fetch_ms(self, instance: str, size_bytes: float) -> float:
        """Time that a worker takes to read so much of a template from disk; 0 while it is unknown."""
        worker = self._workers.get(instance)
        return 0.0 if worker is None else worker.kind.disk.ms(size_bytes)

    def arrivals(self, instance: str) -> LoraLoadTimes:
        """Return how long LoRAs take to come to a worker."""
        worker = self._workers.get(instance)
        return UNTOLD if worker is None else worker.kind.arrivals

    def kinds(self) -> Iterator[ModelDeviceCosts]:
        """The costs of each kind, and how good they are."""
        for (digest, device), kind in self._kinds.items():
            state = kind.steps.state
            yield ModelDeviceCosts(model_digest=digest, device=device, compute=state.compute, load=state.load)


_Lasting = tuple[NetworkOperations, BlockMode, int, bool, float, float, tuple[tuple[str, ControlWork], ...]]
"""The fields of a pace beside its costs."""
_ANEW: Final = {"samples": 0, "outliers": 0}
"""The counts of a regression that begins: its samples are those of the router."""


class _ModelDeviceEstimator:
    """The regressions of one model on one device."""

    def __init__(self, costs: WorkerCosts) -> None:
        self.steps = CostModel(costs.compute.model_copy(update=_ANEW), costs.load.model_copy(update=_ANEW))
        self.disk = UnitTime()
        self.arrivals = LoraLoadTimes()
        self.workers = 0
        """How many there are of the kind."""
        self._untaught = 0
        """Steps since the regression took one in."""
        self._paces: dict[tuple[_Lasting, frozenset[StepParallelism]], StepTimeModel] = {}
        """With the present costs."""
        self._fitted: StepCosts | None = None
        """The present costs, of which the paces are."""

    def ways_of(self, told: WorkerCosts) -> frozenset[StepParallelism]:
        """The ways that a worker tells; those that are new to the kind are followed from now on."""
        if not told.degrees:
            return frozenset()
        ways = frozenset(StepParallelism(one.degree, one.halves) for one in told.degrees)
        if not ways <= {way for way, _ in self.steps.ways}:
            begun = (
                one.model_copy(update={"compute": one.compute.model_copy(update=_ANEW)})
                for one in told.degrees
            )
            self.steps.learn_of(begun)
        return ways

    def pace(self, worker: _Worker, loading: float) -> StepTimeModel:
        """The same object for the same values, until costs are refitted."""
        costs = self.steps.costs
        if costs is not self._fitted:
            self._paces, self._fitted = {}, costs
        lasting = worker.operations, worker.reused, worker.renewed_every, worker.keeps_padding
        key = *lasting, worker.told, loading, worker.controls
        pace = self._paces.get((key, worker.ways))
        if pace is None:
            ways = tuple((way, of_way) for way, of_way in self.steps.ways if way in worker.ways)
            pace = self._paces[key, worker.ways] = StepTimeModel(costs, *key, ways)
        return pace

    def loaded(self, shown: WorkerState) -> None:
        """Take in a worker's latest loads."""
        for load in shown.loads:
            if load.tier is Tier.MEMORY:
                self.steps.observe_load(load.size_bytes, load.load_ms)
            else:
                self.disk.observe(load.size_bytes, load.load_ms)
        for arrived in shown.adapter_loads:
            self.arrivals.observe(arrived)

    def step(self, sample: StepSample, slowness: float) -> float:
        """Take in a step; return how slow its worker is after it."""
        work, way = work_of(sample), StepParallelism(sample.degree, sample.halves)
        costs = self.steps.costs if way == ALONE else dict(self.steps.ways).get(way)
        if costs is None:  # the worker's profile lacks the way: it was fitted to nothing to follow
            return slowness
        ratio = sample.step_ms / max(1e-6, costs.step_ms(work))
        self._untaught += 1
        if self._untaught * TEACHERS >= self.workers:
            self._untaught = 0
            self.steps.observe_step(work, sample.step_ms, degree=way.degree, halves=way.halves)
        bounded = min(SLOWEST, max(1 / SLOWEST, ratio))
        return slowness + SMOOTHING * (bounded - slowness)


def work_of(sample: StepSample) -> StepWork:
    """Return what a step computed, as its sample tells."""
    return StepWork(
        sample.calls,
        sample.sequences,
        sample.linear,
        sample.attention,
        sample.convolution,
        sample.gathered,
        sample.low_rank,
        sample.segments,
        sample.control,
    )
