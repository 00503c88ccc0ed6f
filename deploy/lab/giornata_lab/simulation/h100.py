"""Profiles of Flux.1-dev on several H100s, derived and not measured: they ship as files beside this one.

They say that they are derived: simulations take them, denoisers refuse them.
:mod:`giornata_lab.simulation.degrees.step_times` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from giornata.planning.cost_model import Profile

MACHINES: Final[Mapping[str, bool]] = {"h100": False, "h100-eager": True}
"""By name: whether its engine is not compiled."""


@cache
def shipped(name: str) -> Profile:
    """That of a machine of :data:`MACHINES`."""
    return Profile.model_validate_json(path(name).read_bytes())


def path(name: str) -> Path:
    """Its file."""
    return Path(__file__).with_name(f"{name}.json")
