"""The baseline `proactive` of ROCK's evaluation: what was popular lately is loaded wherever it fits. Pure."""

from __future__ import annotations

from typing import Final

from giornata.residency.plans.filling import AdapterSelection, pins_of
from giornata.residency.plans.values import ResidencySnapshot, Wanted
from giornata.residency.uses import AdapterUsage

PERIOD_S: Final = 60.0
"""How often it plans."""
HALF_LIFE_S: Final = 600.0
"""Half-life of the uses that it is given."""
SHARE: Final = 0.5
"""Share of each tier that it fills."""
LEAST_USES: Final = 0.05
"""Below it, an adapter is not popular: one use, 43 minutes ago."""


def proactive(observed: ResidencySnapshot, uses: AdapterUsage, now: float) -> Wanted:
    """The most popular adapters, as many as fit into half of each place."""
    counted = {digest: n for digest in observed.sizes if (n := uses.lately(digest, now)) >= LEAST_USES}
    popular = sorted(counted, key=lambda digest: (-counted[digest], digest))
    wanted = {}
    for place in observed.places:
        filling = AdapterSelection(place, observed.sizes, pins_of(place, observed), SHARE)
        for digest in popular:
            filling.take(digest)
        wanted[place.name] = filling.chosen
    return wanted
