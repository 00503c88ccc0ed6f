"""A memory limit that learns: a step that did not fit is not tried again at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import structlog

from giornata.planning.costs import StepCosts
from giornata_denoiser.engine.weighing import StepBudget, fits, step_bytes
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)

STEP: Final = 1 / 8
"""By which share of a step that did not fit the next ones are smaller, and by which the limit rises again."""
CALM: Final = 1000
"""Steps without a shortage after which the limit rises: a step that fails costs its batch about one step a row."""


class MemoryLimit:
    """The budget of an engine's steps, lower for a while after one that ran out of memory.

    It rises again, since the shortage may have been another program's; slowly, since it mostly was not.
    """

    def __init__(self, budget: StepBudget, family: ModelFamily) -> None:
        self._most, self._family = budget, family
        self.budget = budget
        self._calm = 0

    def fits(self, rows: Sequence[Row], costs: StepCosts) -> bool:
        """Whether `rows` may share a step now."""
        return fits(rows, self.budget, costs, self._family)

    def ran_out(self, rows: Sequence[Row]) -> None:
        """A step of `rows` did not fit: later ones take less."""
        needed = step_bytes(rows, self.budget, self._family)
        self._calm = 0
        self._set(min(self.budget.memory_bytes, needed) * (1 - STEP))
        log.warning("step_out_of_memory", rows=len(rows), bytes=needed, limit=self.budget.memory_bytes)

    def went_well(self) -> None:
        """One more step fitted."""
        if self.budget.memory_bytes < self._most.memory_bytes:
            self._calm += 1
            if self._calm >= CALM:
                self._calm = 0
                self._set(self.budget.memory_bytes * (1 + STEP))

    def _set(self, memory_bytes: float) -> None:
        self.budget = replace(self.budget, memory_bytes=min(memory_bytes, self._most.memory_bytes))
