"""How many examples a property is tried with: those of the profile, or a multiple where the reason stands beside it."""

from __future__ import annotations

from hypothesis import settings


def examples(times: float) -> settings:
    """Decorate a property: `times` the examples of the profile, 25 by default and 500 for ``nightly``."""
    return settings(max_examples=max(1, round(times * settings().max_examples)))
