"""What steps and loads cost: begun from a profile, refined by every sample. Pure.

A worker follows its own costs, the router those of all workers of a kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from giornata.planning.costs import StepCosts, Work
from giornata.planning.profile import Profile
from giornata.planning.regression import Online, determination
from giornata.wire.workers import CostFit, WorkerCosts

EVERY: Final = 16
"""Samples between two refits: a refit takes longer than taking in all of these."""
WINDOW: Final = 256
"""Latest samples over which predictions are graded."""
FEWEST: Final = 32
"""Samples that R² takes."""
QUEUED: Final = 4096
"""Most loads that wait for the next step; the oldest are dropped."""


class CostModel:
    """Follows one machine.

    Samples enter relative to the prediction, so that short steps count as much as long ones, as in the profile's own
    fit, and an outlier is one by its factor.

    Steps are observed and costs are asked for in one thread, the engine's. Loads may be observed in any: they wait in a
    queue for the next step. Each refit replaces `costs`, and `state` for telemetry, as a whole: every thread may read
    them.

    It begins with `compute`, by :data:`giornata.planning.costs.COMPUTE`, and `load`, by
    :data:`giornata.planning.costs.LOAD`.
    """

    def __init__(self, compute: CostFit, load: CostFit) -> None:
        self._compute, self._load = _FollowedFit(compute), _FollowedFit(load)
        self._loads: deque[tuple[int, float]] = deque(maxlen=QUEUED)
        self.costs = StepCosts(compute.weights, load.weights)
        self.state = WorkerCosts(compute=compute, load=load)

    @classmethod
    def of(cls, profile: Profile) -> CostModel:
        """A model that begins with what was measured offline."""
        compute, load = (
            CostFit(weights=fit.weights, r2=fit.r2, residual_ms=fit.residual_ms_p50, samples=0, outliers=0)
            for fit in (profile.compute, profile.load)
        )
        return cls(compute, load)

    def observe_step(self, work: Work, step_ms: float) -> bool:
        """Take in a step that computed `work` and did not wait for loads; False for an outlier."""
        taken = self._compute.take(work.features, step_ms)
        changed = self._compute.due
        while self._loads:
            size_bytes, load_ms = self._loads.popleft()
            self._load.take((1.0, float(size_bytes)), load_ms)
            changed = changed or self._load.due
        if changed:
            state = WorkerCosts(compute=self._compute.refreshed(), load=self._load.refreshed())
            self.costs, self.state = StepCosts(state.compute.weights, state.load.weights), state
        return taken

    def observe_load(self, size_bytes: int, load_ms: float) -> None:
        """Take in one slab's load with the next step; callable in any thread."""
        self._loads.append((size_bytes, load_ms))


class _FollowedFit:
    """One regression and how good it is on its latest samples, each predicted before it was taken in."""

    def __init__(self, begun: CostFit) -> None:
        self._online = Online(begun.weights)
        self._weights = begun.weights
        self._recent = np.zeros((WINDOW, 2))
        """(WINDOW, 2): measured and predicted ms, written in a ring."""
        self._unseen = 0
        self.state = begun

    @property
    def due(self) -> bool:
        """Whether there is enough news for :meth:`refreshed`."""
        return self._unseen >= EVERY

    def take(self, features: Sequence[float], ms: float) -> bool:
        """Take in a sample; False for an outlier, which only counts."""
        expected = max(1e-6, sum(w * x for w, x in zip(self._weights, features, strict=True)))
        self._unseen += 1
        taken = self._online.update([x / expected for x in features], ms / expected)
        if taken:
            self._recent[(self._online.samples - 1) % WINDOW] = ms, expected
        return taken

    def refreshed(self) -> CostFit:
        """The state, after a refit."""
        self._unseen = 0
        if self._online.samples:
            self._online.refit()
        self._weights = tuple(self._online.weights.tolist())
        r2, residual = self.state.r2, self.state.residual_ms
        if self._online.samples >= FEWEST:
            measured, predicted = self._recent[: self._online.samples].T
            r2 = determination(measured, measured - predicted)
            residual = float(np.median(np.abs(measured - predicted)))
        self.state = CostFit(
            weights=self._weights,
            r2=r2,
            residual_ms=residual,
            samples=self._online.samples,
            outliers=self._online.outliers,
        )
        return self.state
