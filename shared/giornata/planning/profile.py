"""A machine's profile: what the profiler measured of one model on one device, as a file. Pure but for pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from giornata.planning.costs import StepCosts
from giornata.planning.regression import Fit


class FitRecord(BaseModel):
    """A :class:`giornata.planning.regression.Fit` as it is written down."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    weights: tuple[float, ...]
    """ms per unit."""
    r2: float
    residual_ms_p50: float
    residual_ms_p95: float
    samples: int
    error_p50: float = 0.0
    error_p95: float = 0.0
    """Of absolute residuals, as shares of the measured times."""

    @classmethod
    def of(cls, fit: Fit) -> FitRecord:
        """Its record."""
        return cls(
            names=fit.names,
            weights=fit.weights,
            r2=fit.r2,
            residual_ms_p50=fit.residual_ms_p50,
            residual_ms_p95=fit.residual_ms_p95,
            samples=fit.samples,
            error_p50=fit.error_p50,
            error_p95=fit.error_p95,
        )

    def fit(self) -> Fit:
        """The fit again."""
        return Fit(
            self.names,
            self.weights,
            self.r2,
            self.residual_ms_p50,
            self.residual_ms_p95,
            self.samples,
            self.error_p50,
            self.error_p95,
        )


class BatchCap(BaseModel):
    """How many rows of one size are worth a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int
    """Text and image tokens that a row computes."""
    rows: int
    """Beyond it a step grows as its rows do: more rows make everybody slower and nobody faster."""


class Profile(BaseModel):
    """What was measured, where and of what."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: int = 1
    model: str
    model_digest: str
    device: str
    """As torch names it: a GPU's name, or the processor's."""
    dtype: str
    versions: dict[str, str]
    measured_on: str
    """Date, ISO 8601."""
    blocks: int
    compute: FitRecord
    load: FitRecord
    activation_bytes: float
    """Peak memory of a step per token that it computes, weights and templates not counted."""
    caps: tuple[BatchCap, ...] = ()

    @property
    def costs(self) -> StepCosts:
        """For planner and admission."""
        return StepCosts(self.compute.weights, self.load.weights)
