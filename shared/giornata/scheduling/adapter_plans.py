"""The plans of placement by name, and how often each is made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from giornata.residency.use_based import HALF_LIFE_S, USE_PERIOD_S, Plan, use_plan
from giornata.scheduling.rock import ROCK_PERIOD_S, RockPlan


class AdapterPlan(StrEnum):
    """The name of a plan in configurations and simulations."""

    ROCK = "rock"
    """ROCK's replicas, beside its matching; see :mod:`giornata.scheduling.rock`."""
    USE = "use"
    """What is used most for what another load costs; see :mod:`giornata.residency.use_based`."""
    OFF = "off"
    """None: adapters come as jobs need them."""


class ResidencyPlanner(NamedTuple):
    """A rule and its times."""

    make: Callable[[int], Plan]
    """The plan of a seed."""
    period_s: float
    half_life_s: float = HALF_LIFE_S
    """Half-life of the uses that the plan is given."""


PLANNERS: Final[Mapping[str, ResidencyPlanner]] = {
    AdapterPlan.ROCK: ResidencyPlanner(RockPlan, ROCK_PERIOD_S),
    AdapterPlan.USE: ResidencyPlanner(lambda _: use_plan, USE_PERIOD_S),
}
"""All but `off`."""
