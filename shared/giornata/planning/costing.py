"""What steps and loads cost: linear in what is computed and moved, fitted to a profile, refined by every sample. Pure.

FlashPS (EuroSys '26, section 4.4) estimates computing by the number of masked tokens and loading by bytes, with
R² = 0.99. Coefficients are costs, so that none may be negative (Lawson and Hanson's non-negative least squares). A
worker follows its own costs, the router those of all workers of a kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from giornata.planning.costs import StepCosts, completed
from giornata.planning.degrees import ALONE, StepParallelism, Ways, ways_of
from giornata.planning.operations import NETWORK, StepWork
from giornata.planning.profiles import Profile
from giornata.planning.regression import Array, LinearFit, determination, solver
from giornata.wire.queues import CostFit
from giornata.wire.workers import DegreeCosts, WorkerCosts

FORGETTING: Final = 0.99
"""Weight of the past at each sample."""
TRUST: Final = 0.1
"""In the offline weights, in samples."""
SURPRISE: Final = 6.0
"""A sample this many times farther from the prediction than usual is an outlier."""
USUAL_DECAY: Final = 0.95
STUBBORN: Final = 8
"""So many outliers in a row are no outliers: what they measure has changed."""
EVERY: Final = 16
"""Samples between two refits: a refit takes longer than taking in all of these."""
WINDOW: Final = 256
"""Latest samples over which predictions are graded."""
FEWEST: Final = 32
"""Samples that R² takes."""
QUEUED: Final = 4096
"""Most loads that wait for the next step; the oldest are dropped."""


class OnlineRegression:
    """A fit that follows its machine: least squares with forgetting, drawn to the offline weights where nothing is new.

    Minimises the sum over samples of FORGETTING^age * (time - w x)², plus TRUST samples' worth of (w - offline)² per
    weight, without negative weights. Single outliers (a page fault, another process) are left out.
    """

    def __init__(self, offline: Sequence[float]) -> None:
        self._solve, self._offline = solver(), np.asarray(offline)
        count = len(offline)
        self.weights: Array = self._offline.copy()
        """(features,) ms per unit."""
        self.samples = 0
        self.outliers = 0
        self._mass = 0.0
        self._products = np.zeros((count, count))
        self._answers = np.zeros(count)
        self._usual_ms = 0.0
        self._in_a_row = 0

    def update(self, features: Sequence[float], time_ms: float) -> bool:
        """Take in a sample for the next :meth:`refit`; False where it was an outlier and only counts."""
        x = np.asarray(features, np.float64)
        residual = abs(time_ms - float(self.weights @ x))
        known = self.samples > len(self.weights) and self._usual_ms > 0
        if known and residual > SURPRISE * self._usual_ms and self._in_a_row < STUBBORN:
            self.outliers += 1
            self._in_a_row += 1
            return False
        self._in_a_row = 0
        self.samples += 1
        self._usual_ms = USUAL_DECAY * self._usual_ms + (1 - USUAL_DECAY) * residual
        self._mass = FORGETTING * self._mass + 1
        self._products = FORGETTING * self._products + np.outer(x, x)
        self._answers = FORGETTING * self._answers + x * time_ms
        return True

    def refit(self) -> None:
        """Fit the weights, at least one sample: least squares from the normal equations, by their Cholesky factor."""
        size = np.sqrt(np.diag(self._products) / self._mass)
        size[size == 0] = 1.0
        scaled = self._products / np.outer(size, size) + TRUST * np.eye(len(size))
        answers = self._answers / size + TRUST * self._offline * size
        factor = np.linalg.cholesky(scaled)
        self.weights = self._solve(factor.T, np.linalg.solve(factor, answers))[0] / size


class CostModel:
    """Follows one machine.

    Samples enter relative to the prediction, so that short steps count as much as long ones, as in the profile's own
    fit, and an outlier is one by its factor. Each way to spread a step over devices has a regression of its own, which
    steps of that way alone teach.

    Steps are observed and costs are asked for in one thread, the engine's. Loads may be observed in any: they wait in a
    queue for the next step. Each refit replaces `costs`, `ways`, and `state` for telemetry, as a whole; any thread may
    read.
    """

    def __init__(self, compute: CostFit, load: CostFit, degrees: Iterable[DegreeCosts] = ()) -> None:
        self._computing = {ALONE: _FollowedFit(told_compute(compute))}
        """By way."""
        self._load = _FollowedFit(load)
        self._loads: deque[tuple[int, float]] = deque(maxlen=QUEUED)
        self.costs: StepCosts
        """On one device."""
        self.ways: Ways
        """On several, of each way that is known."""
        self.state: WorkerCosts
        self._publish()
        self.learn_of(degrees)

    @classmethod
    def of(cls, profile: Profile) -> CostModel:
        """A model that begins with what was measured offline."""
        degrees = [
            DegreeCosts(degree=fit.degree, halves=fit.halves, compute=_begun(fit.compute))
            for fit in profile.degrees
        ]
        return cls(_begun(profile.compute), _begun(profile.load), degrees)

    def learn_of(self, degrees: Iterable[DegreeCosts]) -> None:
        """Begin to follow those of these ways that are not known yet, from what is told of them."""
        told = {StepParallelism(one.degree, one.halves): one.compute for one in degrees}
        unknown = told.keys() - self._computing.keys()
        if unknown:
            self._computing |= {way: _FollowedFit(told_compute(told[way])) for way in unknown}
            self._publish()

    def observe_step(self, work: StepWork, step_ms: float, *, degree: int = 1, halves: bool = False) -> bool:
        """Take in a step that computed `work` and did not wait for loads.

        False for an outlier, and for a step of a way that is not known.
        """
        followed = self._computing.get(StepParallelism(degree, halves))
        taken = followed is not None and followed.take(work.features, step_ms)
        while self._loads:
            size_bytes, load_ms = self._loads.popleft()
            self._load.take((1.0, float(size_bytes)), load_ms)
        due = [each for each in (*self._computing.values(), self._load) if each.due]
        for each in due:
            each.refresh()
        if due:
            self._publish()
        return taken

    def _publish(self) -> None:
        alone, load = self._computing[ALONE], self._load
        others = {way: followed for way, followed in self._computing.items() if way != ALONE}
        degrees = tuple(
            DegreeCosts(degree=way.degree, halves=way.halves, compute=others[way].state)
            for way in sorted(others)
        )
        self.costs = StepCosts(alone.weights, load.weights)
        self.ways = ways_of({way: followed.weights for way, followed in others.items()}, load.weights)
        self.state = WorkerCosts(compute=alone.state, load=load.state, degrees=degrees)

    def observe_load(self, size_bytes: int, load_ms: float) -> None:
        """Take in one slab's load with the next step; callable in any thread."""
        self._loads.append((size_bytes, load_ms))


def told_compute(fit: CostFit) -> CostFit:
    """A fit by :data:`COMPUTE` as messages hold it, `adapting` apart from the others; completed where it lacks them."""
    weights = completed((*fit.weights, *fit.adapting))
    own = len(NETWORK)
    return fit.model_copy(update={"weights": weights[:own], "adapting": weights[own:]})


def _begun(fit: LinearFit) -> CostFit:
    """What telemetry tells of a fit to a profile's measurements."""
    return CostFit(weights=fit.weights, r2=fit.r2, residual_ms=fit.residual_ms_p50, samples=0, outliers=0)


class _FollowedFit:
    """One regression and how good it is on its latest samples, each predicted before it was taken in."""

    def __init__(self, begun: CostFit) -> None:
        self.weights = (*begun.weights, *begun.adapting)
        """As they were fitted last."""
        self._online = OnlineRegression(self.weights)
        self._own = len(begun.weights)
        self._recent = np.zeros((WINDOW, 2))
        """(WINDOW, 2): measured and predicted ms, written in a ring."""
        self._unseen = 0
        self.state = begun

    @property
    def due(self) -> bool:
        """Whether there is enough news for :meth:`refresh`."""
        return self._unseen >= EVERY

    def take(self, features: Sequence[float], ms: float) -> bool:
        """Take in a sample; False for an outlier, which only counts."""
        expected = max(1e-6, sum(w * x for w, x in zip(self.weights, features, strict=True)))
        self._unseen += 1
        taken = self._online.update([x / expected for x in features], ms / expected)
        if taken:
            self._recent[(self._online.samples - 1) % WINDOW] = ms, expected
        return taken

    def refresh(self) -> None:
        """Fit again."""
        self._unseen = 0
        if self._online.samples:
            self._online.refit()
        self.weights = tuple(self._online.weights.tolist())
        r2, residual = self.state.r2, self.state.residual_ms
        if self._online.samples >= FEWEST:
            measured, predicted = self._recent[: self._online.samples].T
            r2 = determination(measured, measured - predicted)
            residual = float(np.median(np.abs(measured - predicted)))
        self.state = CostFit(
            weights=self.weights[: self._own],
            adapting=self.weights[self._own :],
            r2=r2,
            residual_ms=residual,
            samples=self._online.samples,
            outliers=self._online.outliers,
        )
