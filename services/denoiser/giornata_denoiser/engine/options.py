"""How an engine reuses templates, and by what it knows their worth: the product's way, and every baseline's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from giornata.planning.batch import BatchPlanner, plan_batch
from giornata.planning.costs import StepCosts, Work
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.blocks.loads import LoadsAhead

UNKNOWN: Final = StepCosts((0.0, 0.0, 1.0, 0.3, 0.0))
"""Costs of a machine that is not measured: computing counts tokens, loading nothing."""


class CostFollower(Protocol):
    """Tells what steps cost on this machine, and learns from steps."""

    @property
    def costs(self) -> StepCosts:
        """The costs as they are known now."""

    def observe_step(self, work: Work, step_ms: float) -> object:
        """Take in a step that computed `work` in `step_ms` and had nothing to load."""


class Guess:
    """The costs of a machine that is not measured."""

    costs: Final = UNKNOWN

    def observe_step(self, work: Work, step_ms: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True, eq=False)
class ReuseOptions:
    """How an engine reuses templates, and by which costs it decides.

    The baselines of the benchmarks are other values of these.
    """

    loader: LoadsAhead | None = None
    """Loads ahead what rows take; without it a block's load is waited for when the block begins."""
    model: CostFollower = field(default_factory=Guess)
    planner: BatchPlanner = plan_batch
    device: Device | None = None
    """How loads get to the engine's device; None where it is the CPU."""
    ahead_bytes: int = 1 << 30
    """Most slabs that are loaded for later steps."""
    correction_bits: int | None = 8
    """Bits of corrections: a row computes its first step in full and corrects by it what it takes later. None corrects
    nothing, as FlashPS does.
    """
