"""All schedulers by name: each policy serves jobs in the order of the line, and ROCK matches queues. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from giornata.scheduling.policies import LOAD_WEIGHT, PolicyName, policy_of
from giornata.scheduling.rock import RockScheduler
from giornata.scheduling.scheduler import QueueOrderScheduler, Scheduler

LOADING_AHEAD: Final = frozenset({PolicyName.FINISH_TIME, PolicyName.DEADLINE_AWARE})
"""Policies that know what loads cost, and begin them while jobs wait."""


def scheduler_of(name: PolicyName, load_weight: float = LOAD_WEIGHT) -> Scheduler:
    """The scheduler of this name; see :func:`giornata.scheduling.policies.policy_of`."""
    if name is PolicyName.ROCK:
        return RockScheduler()
    return QueueOrderScheduler(policy_of(name, load_weight), loads_ahead=name in LOADING_AHEAD)


SCHEDULERS: Final[Mapping[PolicyName, Scheduler]] = MappingProxyType(
    {name: scheduler_of(name) for name in PolicyName}
)
