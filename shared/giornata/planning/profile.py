"""A machine's profile: what the profiler measured of one model on one device, as a file. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from giornata.planning.costs import StepCosts
from giornata.planning.regression import Fit


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

    schema_version: int = 1
    model: str
    model_digest: str
    device: str
    """Torch's name of it: a GPU's name, or the processor's."""
    dtype: str
    versions: dict[str, str]
    measured_on: str
    """Date, ISO 8601."""
    blocks: int
    compute: Fit
    load: Fit
    activation_bytes: float
    """Peak memory of a step per token that it computes, weights and templates not counted."""
    caps: tuple[BatchCap, ...] = ()

    @property
    def costs(self) -> StepCosts:
        """The weights, for planner and admission."""
        return StepCosts(self.compute.weights, self.load.weights)
