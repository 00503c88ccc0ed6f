"""Templates that a simulated worker keeps. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Final

from giornata.wire.workers import Tier

TOLD: Final = 256
"""Templates or LoRAs of a tier that telemetry tells, as :class:`giornata.wire.workers.WorkerState` says."""


@dataclass(frozen=True)
class TemplateSetting:
    """How all workers keep templates."""

    size_bytes: float = 0.0
    kv_bytes: float = 0.0
    """Keys and values that a row takes from memory a step; 0: loads are neglected."""
    registered: frozenset[str] = frozenset()
    """Templates that are recorded at their first edit on a worker; others at their second."""
    preloaded: tuple[str, ...] = ()
    """Templates in memory of every worker from the start, the most popular first, as far as there is room."""


class Tiers:
    """All templates are of one size, so that so many fit into `memory`, and so many on `disk`."""

    def __init__(self, memory: int, disk: int) -> None:
        self._most = {Tier.MEMORY: memory, Tier.DISK: disk}
        self._here: dict[Tier, OrderedDict[str, None]] = {tier: OrderedDict() for tier in self._most}

    def find(self, template: str) -> Tier | None:
        """The fastest tier that has `template`, which counts as used."""
        found = None
        for tier in (Tier.DISK, Tier.MEMORY):
            if template in self._here[tier]:
                self._here[tier].move_to_end(template)
                found = tier
        return found

    def put(self, template: str) -> None:
        """Keep a recorded template, in memory and on disk."""
        self._put(Tier.DISK, template)
        self.fetched(template)

    def fetched(self, template: str) -> None:
        """Keep a template in memory that was read from disk."""
        self._put(Tier.MEMORY, template)

    def resident(self) -> dict[Tier, tuple[str, ...]]:
        """Templates by tier, lately used first, as telemetry tells them."""
        return {tier: tuple(islice(reversed(here), TOLD)) for tier, here in self._here.items()}

    def _put(self, tier: Tier, template: str) -> None:
        here = self._here[tier]
        here[template] = None
        here.move_to_end(template)
        while len(here) > self._most[tier]:
            here.popitem(last=False)
