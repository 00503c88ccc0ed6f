"""How many examples a property is tried with: those of the profile, or a multiple where the reason stands beside it."""

from __future__ import annotations

import os

from hypothesis import settings

# The first example may pay for an import, or for a busy machine: no example has a deadline.
settings.register_profile("giornata", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "giornata"))


def examples(times: float) -> settings:
    """Decorate a property: `times` the examples of the profile, 25 by default and 500 for ``nightly``."""
    return settings(max_examples=max(1, round(times * settings().max_examples)))
