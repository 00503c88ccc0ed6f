"""What steps and loads cost: linear in what is computed and moved, fitted to a profile, refined by every sample. Pure.

FlashPS (EuroSys '26, section 4.4) estimates computing by the number of masked tokens and loading by bytes, with
R² = 0.99. Coefficients are costs, so that none may be negative (Lawson and Hanson's non-negative least squares). A
worker follows its own costs, the router those of all workers of a kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator
from scipy.optimize import nnls

from giornata.planning.costs import StepCosts
from giornata.planning.operations import Work
from giornata.wire.blocks import BlockSpec
from giornata.wire.workers import CostFit, WorkerCosts

Array = NDArray[np.float64]

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


class Fit(BaseModel):
    """A linear model and how good it is on what it was fitted to, as a profile holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    weights: tuple[float, ...]
    """ms per unit, none negative."""
    r2: float
    """Coefficient of determination; 1 where the times are constant and met."""
    residual_ms_p50: float
    residual_ms_p95: float
    """Quantiles of absolute residuals."""
    samples: int
    error_p50: float = 0.0
    error_p95: float = 0.0
    """Quantiles of absolute residuals, each as a share of its time."""

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))


def fit(names: Sequence[str], features: Array, times: Array, *, relative: bool = False) -> Fit:
    """Least squares without negative weights.

    Args:
        names: one a feature.
        features: (samples, features); a constant 1 is one of them where there is an offset.
        times: (samples,) ms, above 0 where residuals are relative.
        relative: minimise residuals as shares of the times: a short one then counts as much as a long one.

    Raises:
        ValueError: shapes do not fit together, or there are fewer samples than features.
    """
    if features.shape != (len(times), len(names)) or len(times) < len(names):
        raise ValueError(
            f"received features {features.shape} and {len(times)} times for {len(names)} names; "
            "one row a time and at least as many rows as names are needed"
        )
    emphasis = 1 / times if relative else np.ones(len(times))
    weighed = features * emphasis[:, None]
    scale = np.abs(weighed).max(0)
    scale[scale == 0] = 1.0
    weights = nnls(weighed / scale, times * emphasis)[0] / scale
    return graded(names, weights, features, times)


def graded(names: Sequence[str], weights: Array, features: Array, times: Array) -> Fit:
    """Grade `weights`, (features,) ms per unit, on `features`, (samples, features), and `times`, (samples,) ms."""
    residuals = times - features @ weights
    shares = np.abs(residuals) / np.maximum(np.abs(times), np.finfo(np.float64).tiny)
    p50, p95 = np.quantile(np.abs(residuals), (0.5, 0.95)).tolist()
    error_p50, error_p95 = np.quantile(shares, (0.5, 0.95)).tolist()
    return Fit(
        names=tuple(names),
        weights=tuple(weights.tolist()),
        r2=determination(times, residuals),
        residual_ms_p50=p50,
        residual_ms_p95=p95,
        samples=len(times),
        error_p50=error_p50,
        error_p95=error_p95,
    )


def determination(times: Array, residuals: Array) -> float:
    """R², the share of the times' spread that is predicted; 1 where the times are constant and met."""
    spread, missed = float(((times - times.mean()) ** 2).sum()), float((residuals**2).sum())
    return 1 - missed / spread if spread > 0 else float(missed < 1e-9)


SCHEMA: Final = 2
"""Of a profile. Those of schema 1 counted tokens and pairs."""


class BatchCap(BaseModel):
    """How many rows of one size are worth a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int
    """Text and image tokens that a row computes."""
    rows: int
    """Beyond it a step grows as its rows do: more rows make every row slower and none faster."""


class Profile(BaseModel):
    """The measurements of one model on one device."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: int = SCHEMA
    model: str
    model_digest: str
    device: str
    """Torch's name of it: a GPU's name, or the processor's."""
    dtype: str
    versions: dict[str, str]
    measured_on: str
    """Date, ISO 8601."""
    blocks: tuple[BlockSpec, ...]
    """Equal ones counted, in the order of the first of each."""
    compute: Fit
    load: Fit
    activation_bytes: float
    """Peak memory of a step per token that it computes, weights and templates not counted."""
    caps: tuple[BatchCap, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_schema(cls, given: Any) -> Any:
        received = given.get("schema_version", SCHEMA) if isinstance(given, dict) else SCHEMA
        if received != SCHEMA:
            raise ValueError(
                f"received a profile of schema {received}, accepted is {SCHEMA}: its costs are of other features"
            )
        return given

    @property
    def costs(self) -> StepCosts:
        """The weights, for planner and admission."""
        return StepCosts(self.compute.weights, self.load.weights)


class Online:
    """A fit that follows its machine: least squares with forgetting, drawn to the offline weights where nothing is new.

    Minimises the sum over samples of FORGETTING^age * (time - w x)², plus TRUST samples' worth of (w - offline)² per
    weight, without negative weights. Single outliers (a page fault, another process) are left out.
    """

    def __init__(self, offline: Sequence[float]) -> None:
        self._offline = np.asarray(offline)
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
        self.weights = nnls(factor.T, np.linalg.solve(factor, answers))[0] / size


class CostModel:
    """Follows one machine.

    Samples enter relative to the prediction, so that short steps count as much as long ones, as in the profile's own
    fit, and an outlier is one by its factor.

    Steps are observed and costs are asked for in one thread, the engine's. Loads may be observed in any: they wait in a
    queue for the next step. Each refit replaces `costs`, and `state` for telemetry, as a whole; any thread may read.
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
        while self._loads:
            size_bytes, load_ms = self._loads.popleft()
            self._load.take((1.0, float(size_bytes)), load_ms)
        if self._compute.due or self._load.due:
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
