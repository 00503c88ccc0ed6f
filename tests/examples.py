"""How many examples a property is tried with: those of the profile, or a multiple where the reason stands beside it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The first example may pay for an import, or for a busy machine: neither an example nor the drawing of all has a limit.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("giornata", UNHURRIED, max_examples=25, derandomize=True, database=None)
settings.register_profile("nightly", UNHURRIED, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "giornata"))


def examples(times: float) -> settings:
    """Decorate a property: `times` the examples of the profile, 25 by default and 500 for ``nightly``."""
    return settings(max_examples=max(1, round(times * settings().max_examples)))
