"""A profile: what was measured of one model on one device, as it is kept in a file. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from giornata.planning.costs import StepCosts, completed
from giornata.planning.degrees import DegreeFit, Ways, ways_of
from giornata.planning.operations import ADAPTING, COMPUTE
from giornata.planning.regression import LinearFit
from giornata.wire.blocks import BlockSpec

SCHEMA: Final = 3
"""Version of a profile's schema. Schema 1 counted tokens and pairs; 2 knew no adapters, and is completed."""
WITHOUT_ADAPTERS: Final = 2


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

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_schema(cls, given: Any) -> Any:
        if isinstance(given, dict):  # batch caps of earlier versions decide nothing
            given = {name: value for name, value in given.items() if name != "caps"}
        received = given.get("schema_version", SCHEMA) if isinstance(given, dict) else SCHEMA
        if received == WITHOUT_ADAPTERS and isinstance(given.get("compute"), dict):
            return {**given, "schema_version": SCHEMA, "compute": _completed(given["compute"])}
        if received != SCHEMA:
            raise ValueError(
                f"received a profile of schema {received}, accepted are {SCHEMA} and {WITHOUT_ADAPTERS}: "
                "its costs are of other features"
            )
        return given

    @field_validator("degrees")
    @classmethod
    def _each_once(cls, given: tuple[DegreeFit, ...]) -> tuple[DegreeFit, ...]:
        names = [f"{fit.degree}{' in halves' if fit.halves else ''}" for fit in given]
        more = [name for name, count in Counter(names).items() if count > 1]
        if more:
            raise ValueError(f"received degree {', '.join(more)} more than once; accepted is one fit of each")
        return given

    @property
    def costs(self) -> StepCosts:
        """The weights, for planner and admission."""
        return StepCosts(self.compute.weights, self.load.weights)

    @property
    def ways(self) -> Ways:
        """The weights of steps on several devices."""
        return ways_of({fit.way: fit.compute.weights for fit in self.degrees}, self.load.weights)


def _completed(compute: dict[str, Any]) -> dict[str, Any]:
    """A fit of schema 2, with weights of adapters."""
    weights = completed(tuple(compute.get("weights", ())))
    return {**compute, "names": COMPUTE, "weights": weights, "derived": ADAPTING}
