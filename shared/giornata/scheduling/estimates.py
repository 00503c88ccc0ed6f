"""What steps and loads cost on every worker, learnt from what all workers tell of theirs. Pure.

One regression for every model and device (FlashPS, EuroSys '26, section 4.4), begun from the profile of whichever
worker is heard first and refitted with forgetting; and for every worker by how much it is slower, so that a host that
is throttled or shared with others is known for it. A worker of a known kind is predicted from its first moment. By how
much its planner expected loads to make steps longer it tells with every step; so much longer are its next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from giornata.planning.costing import CostModel
from giornata.planning.costs import COMPUTE, LOAD, Work
from giornata.planning.profile import FitRecord
from giornata.scheduling.demand import Pace
from giornata.scheduling.rate import Rate
from giornata.wire.values import Mode
from giornata.wire.workers import CostFit, KindCosts, LoadSample, StepSample, Tier, WorkerCosts

Kind = tuple[str, str]
"""Digest of a model, and a device."""
SMOOTHING: Final = 0.1
"""Weight of the latest step in the running mean of how much slower a worker is."""
UNKNOWN: Final = Pace()
SLOWEST: Final = 8.0
"""A single step counts as at most this many times slower, or faster, than predicted: page faults say little."""


@dataclass(slots=True)
class _Worker:
    kind: Kind
    blocks: int
    reused: Mode
    slowness: float = 1.0
    excess: Rate = field(default_factory=Rate)
    """Of planned steps, in a millisecond of what rows that reuse compute at least."""


class Estimates:
    """Feed it all telemetry of denoisers."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Followed] = {}
        self._workers: dict[str, _Worker] = {}

    def observe(
        self,
        instance: str,
        model_digest: str,
        costs: WorkerCosts | None,
        samples: Iterable[StepSample] = (),
        loads: Iterable[LoadSample] = (),
    ) -> None:
        """Take in what a worker tells; one without a cost model tells nothing that can be used."""
        if costs is None:
            return
        kind = (model_digest, costs.device)
        worker = self._workers.get(instance)
        if worker is None or worker.kind != kind:
            worker = self._workers[instance] = _Worker(kind, costs.blocks, costs.reused)
        followed = self._kinds.get(kind)
        if followed is None:
            followed = self._kinds[kind] = _Followed(costs)
        for sample in samples:
            if not sample.rows:
                continue
            if sample.reusing_ms:
                worker.excess.observe(sample.reusing_ms, sample.excess_ms)
            if sample.waited_ms == 0:  # else part of it was waiting for loads
                worker.slowness = followed.step(sample, costs.blocks, worker.slowness)
        for load in loads:
            followed.load(load)

    def forget(self, instance: str) -> None:
        """The worker is gone; what its kind costs stays known."""
        self._workers.pop(instance, None)

    def pace(self, instance: str) -> Pace:
        """Of a worker; the same object for workers of one kind that are equally slow."""
        worker = self._workers.get(instance)
        if worker is None:
            return UNKNOWN
        slowness, loading = round(worker.slowness, 2), round(1 + worker.excess.ms(1.0), 2)
        return self._kinds[worker.kind].pace(worker.blocks, worker.reused, slowness, loading)

    def fetch_ms(self, instance: str, size_bytes: float) -> float:
        """Of reading so much of a template from disk, on a worker; 0 as long as nobody did."""
        worker = self._workers.get(instance)
        return 0.0 if worker is None else self._kinds[worker.kind].fetch_ms(size_bytes)

    def kinds(self) -> Iterator[KindCosts]:
        """What is known of each kind, and how good it is."""
        for (digest, device), followed in self._kinds.items():
            state = followed.compute.state
            yield KindCosts(model_digest=digest, device=device, compute=state.compute, load=state.load)


class _Followed:
    """One kind's regressions."""

    def __init__(self, costs: WorkerCosts) -> None:
        self.compute = CostModel(_record(costs.compute, COMPUTE), _record(costs.load, LOAD))
        self._disk = Rate()
        self._paces: dict[tuple[int, Mode, float, float], Pace] = {}
        """With the present costs."""

    def pace(self, blocks: int, reused: Mode, slowness: float, loading: float) -> Pace:
        """The same object for the same values, until costs are refitted."""
        costs, key = self.compute.costs, (blocks, reused, slowness, loading)
        pace = self._paces.get(key)
        if pace is None or pace.costs is not costs:
            self._paces = {of: other for of, other in self._paces.items() if other.costs is costs}
            pace = self._paces[key] = Pace(costs, blocks, reused, slowness, loading)
        return pace

    def step(self, sample: StepSample, blocks: int, slowness: float) -> float:
        """Take in a step; how slow its worker is after that."""
        work = work_of(sample, blocks)
        ratio = sample.step_ms / max(1e-6, self.compute.costs.step_ms(work))
        self.compute.observe_step(work, sample.step_ms)
        bounded = min(SLOWEST, max(1 / SLOWEST, ratio))
        return slowness + SMOOTHING * (bounded - slowness)

    def load(self, sample: LoadSample) -> None:
        """Take in a load."""
        if sample.tier is Tier.MEMORY:
            self.compute.observe_load(sample.size_bytes, sample.load_ms)
            return
        self._disk.observe(sample.size_bytes, sample.load_ms)

    def fetch_ms(self, size_bytes: float) -> float:
        return self._disk.ms(size_bytes)


def work_of(sample: StepSample, blocks: int) -> Work:
    """What a step computed in all of so many blocks, of which its sample tells means."""
    tokens = sample.image_tokens + sample.text_tokens
    return Work(sample.sequences, tokens, sample.projected_tokens, sample.attention_pairs) * blocks


def _record(fit: CostFit, names: tuple[str, ...]) -> FitRecord:
    return FitRecord(
        names=names,
        weights=fit.weights,
        r2=fit.r2,
        residual_ms_p50=fit.residual_ms,
        residual_ms_p95=fit.residual_ms,
        samples=max(1, fit.samples),
    )
