"""The plans by name, and how often each is made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from giornata.residency import popularity as counting
from giornata.residency.plans import rock, use_based
from giornata.residency.plans.use_based import Plan


class ResidencyPlanName(StrEnum):
    """The name of a plan in configurations and simulations."""

    OFF = "off"
    """None: adapters come as jobs need them."""
    USE = "use"
    """What is used most for what another load costs; see :mod:`giornata.residency.plans.use_based`."""
    ROCK = "rock"
    """ROCK's replicas; see :mod:`giornata.residency.plans.rock`."""
    PROACTIVE = "proactive"
    """What was popular lately, in half of each tier; see :mod:`giornata.residency.plans.rock`."""


class ResidencyPlanner(NamedTuple):
    """A rule and its times."""

    make: Callable[[int], Plan]
    """The plan of a seed."""
    period_s: float
    half_life_s: float
    """Half-life of the uses that the plan is given."""


PLANNERS: Final[Mapping[ResidencyPlanName, ResidencyPlanner]] = {
    ResidencyPlanName.USE: ResidencyPlanner(
        lambda _: use_based.use_plan, use_based.USE_PERIOD_S, counting.HALF_LIFE_S
    ),
    ResidencyPlanName.ROCK: ResidencyPlanner(rock.RockPlan, rock.ROCK_PERIOD_S, counting.HALF_LIFE_S),
    ResidencyPlanName.PROACTIVE: ResidencyPlanner(
        lambda _: rock.proactive_plan, rock.PROACTIVE_PERIOD_S, rock.PROACTIVE_HALF_LIFE_S
    ),
}
"""All but `off`."""
