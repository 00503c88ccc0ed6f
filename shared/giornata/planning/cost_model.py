"""The cost model of a machine: weights of what steps compute and move, fitted to a profile, refined by samples. Pure.

Planner, admission, router and simulator share this model. FlashPS (EuroSys '26, section 4.4) estimates computing by the
number of masked tokens and loading by bytes, with R² = 0.99; here operations are counted by kind, so that one set of
weights serves every mixture of modes, masks and picture sizes. Coefficients are costs, so that none may be negative.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any, Final, NamedTuple, Self

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from giornata.planning.operations import (
    NETWORK,
    NetworkOperations,
    SequenceShape,
    StepCosts,
    StepWork,
    complete_weights,
    step_work,
)
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata.wire.workers import CostFit, DegreeCosts, WorkerCosts

Array = NDArray[np.float64]
RENEWALS: Final = 3
"""How often a row without a template computes everything at the least; `docs/results/reuse.md` has the measurements."""


def refresh_interval(steps: int, most: int) -> int:
    """Without a template: from one of a row's `steps` that is computed in full to the next, at `most` so many.

    In a short run noise levels are far apart: :data:`RENEWALS` steps are in full at the least. 0 for none but these.
    """
    return min(most, math.ceil(steps / RENEWALS))


def refresh_offset(number: int, steps: int, every: int) -> int:
    """By how many steps the `number`-th of some rows that begin together renews late: the first one latest.

    So they are computed in full in different steps, and in as many. Later is better than earlier;
    `docs/results/reuse.md` has the measurements.
    """
    if every < 1:
        return 0
    last = (math.ceil(steps / every) - 1) * every
    latest = min((every - 1) // 2, steps - 1 - last)
    return latest - number % (1 + latest)


def worth_reusing(
    costs: StepCosts,
    operations: NetworkOperations,
    shapes: Sequence[SequenceShape],
    modes: Sequence[BlockMode],
    bytes_a_step: float,
) -> bool:
    """Return whether a row's step with reuse ends earlier than in full, loads behind computing: below the crossover.

    `shapes` and `modes`, of the row's blocks, are those with reuse; `bytes_a_step` are loaded on average.
    """
    whole = [replace(shape, padding=0) for shape in shapes]
    full, masked = (
        costs.step_ms(step_work(operations, of, [chosen] * len(of)))
        for of, chosen in ((whole, (BlockMode.FULL,) * len(modes)), (shapes, modes))
    )
    return max(masked, costs.load_ms(bytes_a_step)) < full


class LinearFit(BaseModel):
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
    derived: tuple[str, ...] = ()
    """Names of weights that nothing measured tells: they follow from the others."""

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return float(np.dot(self.weights, features))


def nnls_solver() -> Any:
    """Lawson and Hanson's solver. Asking for it loads it, for half a second: a step and a request find it loaded."""
    return scipy.optimize.nnls


def fit(names: Sequence[str], features: Array, times: Array, *, relative: bool = False) -> LinearFit:
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
    return grade_fit(names, _weighted_fit(features, times, emphasis), features, times)


HUBER: Final = 1.345
"""Residuals of more standard deviations than this count by their size instead of its square (Huber, 1964)."""
DEVIATION: Final = 1.4826
"""The standard deviation of normal residuals ÷ the median of their sizes."""
REWEIGHTINGS: Final = 20
"""Fits until the weights of samples no longer change, at most."""


def robust_fit(names: Sequence[str], features: Array, times: Array) -> LinearFit:
    """Like :func:`fit` of relative residuals, by Huber's loss instead of squares: disturbed samples move little.

    Least squares whose samples are weighed anew until their weights have settled.
    """
    weights, emphasis = np.asarray(fit(names, features, times, relative=True).weights), np.ones(len(times))
    for _ in range(REWEIGHTINGS):
        missed = np.abs(1 - features @ weights / times)
        limit = HUBER * DEVIATION * max(float(np.median(missed)), 1e-9)
        before, emphasis = emphasis, np.minimum(1, limit / np.maximum(missed, limit))
        if np.allclose(emphasis, before, rtol=1e-3):
            break
        weights = _weighted_fit(features, times, np.sqrt(emphasis) / times)
    return grade_fit(names, weights, features, times)


def _weighted_fit(features: Array, times: Array, emphasis: Array) -> Array:
    """(features,) weights that minimise squares of residuals, each multiplied by its emphasis, (samples,)."""
    weighed = features * emphasis[:, None]
    scale = np.abs(weighed).max(0)
    scale[scale == 0] = 1.0
    return np.asarray(nnls_solver()(weighed / scale, times * emphasis)[0] / scale)


def grade_fit(names: Sequence[str], weights: Array, features: Array, times: Array) -> LinearFit:
    """Grade `weights`, (features,) ms per unit, on `features`, (samples, features), and `times`, (samples,) ms."""
    residuals = times - features @ weights
    shares = np.abs(residuals) / np.maximum(np.abs(times), np.finfo(np.float64).tiny)
    p50, p95 = np.quantile(np.abs(residuals), (0.5, 0.95)).tolist()
    error_p50, error_p95 = np.quantile(shares, (0.5, 0.95)).tolist()
    return LinearFit(
        names=tuple(names),
        weights=tuple(weights.tolist()),
        r2=r_squared(times, residuals),
        residual_ms_p50=p50,
        residual_ms_p95=p95,
        samples=len(times),
        error_p50=error_p50,
        error_p95=error_p95,
    )


def r_squared(times: Array, residuals: Array) -> float:
    """R², the share of the times' spread that is predicted; 1 where the times are constant and met."""
    spread, missed = float(((times - times.mean()) ** 2).sum()), float((residuals**2).sum())
    return 1 - missed / spread if spread > 0 else float(missed < 1e-9)


HALVED: Final = 2
"""The degree at which guided rows have a second way."""


class StepParallelism(NamedTuple):
    """The division of a step among devices. Its weights are fitted to steps of this way alone."""

    degree: int = 1
    """Devices."""
    halves: bool = False
    """One of two devices computes the unconditional sequences (Katz, section 7); else all share each sequence."""


ALONE: Final = StepParallelism()
"""One device."""
Ways = tuple[tuple[StepParallelism, StepCosts], ...]
"""Costs of ways beside :data:`ALONE`, in ascending order."""


class DegreeFit(BaseModel):
    """The measurements of one way, as a profile holds them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    degree: int
    halves: bool = False
    compute: LinearFit

    @model_validator(mode="after")
    def _is_a_way(self) -> DegreeFit:
        if self.degree <= ALONE.degree or (self.halves and self.degree != HALVED):
            raise ValueError(
                f"received degree {self.degree}{' in halves' if self.halves else ''}; "
                f"accepted are degrees above {ALONE.degree}, in halves {HALVED} alone"
            )
        return self

    @property
    def way(self) -> StepParallelism:
        """Return what was measured."""
        return StepParallelism(self.degree, self.halves)


def ways_of(weights: Mapping[StepParallelism, tuple[float, ...]], load: tuple[float, ...]) -> Ways:
    """Costs by way from weights of computing; a device loads as it does alone."""
    return tuple((way, StepCosts(weights[way], load)) for way in sorted(weights))


SCHEMA: Final = 3
"""Version of a profile's schema. Schema 1 counted tokens and pairs; 2 knew no adapters."""


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
    compute: LinearFit
    """Fit of the time that steps on one device take."""
    degrees: tuple[DegreeFit, ...] = ()
    """Fits of the time that steps on several devices take. A degree that is not here is not used."""
    load: LinearFit
    activation_bytes: float
    """Peak memory of a step per token that it computes, weights and templates not counted."""
    even_bytes: float | None = None
    """Likewise where all sequences are equally long, so that their modulation is broadcast; None: not known apart."""
    derived: str = ""
    """What it was derived from, where nothing was measured: for simulations alone, no denoiser takes it."""

    @model_validator(mode="after")
    def _is_of_this_schema_with_each_degree_once(self) -> Self:
        if self.schema_version != SCHEMA:
            raise ValueError(
                f"received a profile of schema {self.schema_version}, accepted is {SCHEMA}: "
                "its costs are of other features"
            )
        names = Counter(f"{fit.degree}{' in halves' if fit.halves else ''}" for fit in self.degrees)
        if more := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"received degree {', '.join(more)} more than once; accepted is one fit of each")
        return self

    @property
    def costs(self) -> StepCosts:
        """The weights, for planner and admission."""
        return StepCosts(self.compute.weights, self.load.weights)

    @property
    def ways(self) -> Ways:
        """The weights of steps on several devices."""
        return ways_of({fit.way: fit.compute.weights for fit in self.degrees}, self.load.weights)


# The model in service.


FORGETTING: Final = 0.99
"""Weight of the past at each sample."""
TRUST: Final = 0.1
"""In the offline weights, in samples."""
SURPRISE: Final = 6.0
"""A sample this many times farther from the prediction than usual is an outlier."""
USUAL_DECAY: Final = 0.95
SLOWEST: Final = 8.0
"""A machine is held to be at most so many times slower, or faster, than the offline weights say."""
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

    Minimises the sum over samples of FORGETTING^age * (time - w x)², plus TRUST samples' worth of
    (w - slowness * offline)² per weight, without negative weights: a machine that is slower than on the day of its
    profile is slower in what no sample shows, too. Samples enter relative to the prediction, so that short steps count
    as much as long ones, as in the profile's own fit, and an outlier is one by its factor. Single outliers (a page
    fault, another process) are left out.
    """

    def __init__(self, begun: CostFit) -> None:
        self.state = begun
        """What telemetry tells of it; its predictions are graded on the latest samples, before each was taken in."""
        self.weights: tuple[float, ...] = (*begun.weights, *begun.adapting)
        """ms per unit, as they were fitted last."""
        self._solve, self._offline, self._own = nnls_solver(), np.asarray(self.weights), len(begun.weights)
        count = len(self.weights)
        self._products, self._answers, self._mass = np.zeros((count, count)), np.zeros(count), 0.0
        self._log_slowness = 0.0
        """Sum of the logarithms of what samples took ÷ what the offline weights say, forgotten as the others."""
        self._recent = np.zeros((WINDOW, 2))
        """(WINDOW, 2): measured and predicted ms, written in a ring."""
        self._samples = self._outliers = self._in_a_row = self._unseen = 0
        self._usual = 0.0
        """Usual distance from the prediction, as a share of it."""

    @property
    def due(self) -> bool:
        """Return whether there is enough news for :meth:`refit`."""
        return self._unseen >= EVERY

    def take(self, features: Sequence[float], ms: float) -> bool:
        """Take in a sample for the next refit; False where it was an outlier and only counts."""
        expected = max(1e-6, sum(map(mul, self.weights, features)))
        x, time = np.asarray(features, np.float64) / expected, ms / expected
        residual = abs(time - float(x @ self.weights))
        self._unseen += 1
        known = self._samples > len(self.weights) and self._usual > 0
        if known and residual > SURPRISE * self._usual and self._in_a_row < STUBBORN:
            self._outliers += 1
            self._in_a_row += 1
            return False
        self._recent[self._samples % WINDOW] = ms, expected
        self._in_a_row = 0
        self._samples += 1
        self._usual = USUAL_DECAY * self._usual + (1 - USUAL_DECAY) * residual
        self._mass = FORGETTING * self._mass + 1
        self._products = FORGETTING * self._products + np.outer(x, x)
        self._answers = FORGETTING * self._answers + x * time
        slowness = min(SLOWEST, max(1 / SLOWEST, time / max(1e-6, float(x @ self._offline))))
        self._log_slowness = FORGETTING * self._log_slowness + math.log(slowness)
        return True

    def refit(self) -> None:
        """Fit the weights: least squares from the normal equations, by their Cholesky factor."""
        self._unseen = 0
        if self._samples:
            size = np.sqrt(np.diag(self._products) / self._mass)
            size[size == 0] = 1.0
            scaled = self._products / np.outer(size, size) + TRUST * np.eye(len(size))
            slowness = math.exp(self._log_slowness / self._mass)
            answers = self._answers / size + TRUST * slowness * self._offline * size
            factor = np.linalg.cholesky(scaled)
            self.weights = tuple((self._solve(factor.T, np.linalg.solve(factor, answers))[0] / size).tolist())
        r2, residual_ms = self.state.r2, self.state.residual_ms
        if self._samples >= FEWEST:
            measured, predicted = self._recent[: self._samples].T
            r2 = r_squared(measured, measured - predicted)
            residual_ms = float(np.median(np.abs(measured - predicted)))
        self.state = CostFit(
            weights=self.weights[: self._own],
            adapting=self.weights[self._own :],
            r2=r2,
            residual_ms=residual_ms,
            samples=self._samples,
            outliers=self._outliers,
        )


class CostModel:
    """Follows one machine.

    Each way to spread a step over devices has a regression of its own, which steps of that way alone teach.

    Steps are observed and costs are asked for in one thread, the engine's. Loads may be observed in any: they wait in a
    queue for the next step. Each refit replaces `costs`, `ways`, and `state` for telemetry, as a whole; any thread may
    read.
    """

    def __init__(self, compute: CostFit, load: CostFit, degrees: Iterable[DegreeCosts] = ()) -> None:
        self._computing = {ALONE: OnlineRegression(encode_compute_fit(compute))}
        """By way."""
        self._load = OnlineRegression(load)
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
            self._computing |= {way: OnlineRegression(encode_compute_fit(told[way])) for way in unknown}
            self._publish()

    def observe_step(self, work: StepWork, step_ms: float, *, degree: int = 1, halves: bool = False) -> bool:
        """Take in a step that computed `work` and did not wait for loads.

        False for an outlier, and for a step of a way that is not known.
        """
        followed = self._computing.get(StepParallelism(degree, halves))
        taken = followed is not None and followed.take(work, step_ms)
        while self._loads:
            size_bytes, load_ms = self._loads.popleft()
            self._load.take((1.0, float(size_bytes)), load_ms)
        due = [each for each in (*self._computing.values(), self._load) if each.due]
        for each in due:
            each.refit()
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


def encode_compute_fit(fit: CostFit) -> CostFit:
    """A fit by :data:`COMPUTE` as messages hold it, `adapting` apart from the others; completed where it lacks them."""
    weights = complete_weights((*fit.weights, *fit.adapting))
    own = len(NETWORK)
    return fit.model_copy(update={"weights": weights[:own], "adapting": weights[own:]})


def _begun(fit: LinearFit) -> CostFit:
    """Return what telemetry tells of a fit to a profile's measurements."""
    return CostFit(weights=fit.weights, r2=fit.r2, residual_ms=fit.residual_ms_p50, samples=0, outliers=0)
