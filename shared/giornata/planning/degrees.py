"""Costs of steps that several devices compute together: one regression for each way, over the same features. Pure.

A *degree* is how many devices compute a step of a row together. How their calls, text and links add up is not modelled:
weights of each way are fitted to steps of that way alone, so that a step of one degree says nothing of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator

from giornata.planning.costs import StepCosts
from giornata.planning.regression import LinearFit

HALVED: Final = 2
"""The degree at which guided rows have a second way."""


class StepParallelism(NamedTuple):
    """How a step is spread over devices."""

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
        """What was measured."""
        return StepParallelism(self.degree, self.halves)


def ways_of(weights: Mapping[StepParallelism, tuple[float, ...]], load: tuple[float, ...]) -> Ways:
    """Costs by way from weights of computing; a device loads as it does alone."""
    return tuple((way, StepCosts(weights[way], load)) for way in sorted(weights))
