"""All schedulers by name: each policy serves jobs in the order of the line, and ROCK matches queues. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from giornata.scheduling.policies import POLICIES, PolicyName
from giornata.scheduling.rock import Rock
from giornata.scheduling.scheduler import InTurn, Scheduler

SCHEDULERS: Final[Mapping[PolicyName, Scheduler]] = MappingProxyType(
    {name: InTurn(policy) for name, policy in POLICIES.items()} | {PolicyName.ROCK: Rock()}
)
