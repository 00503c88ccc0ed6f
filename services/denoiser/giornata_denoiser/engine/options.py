"""How an engine reuses templates, and by what it knows their worth: the product's way, and every baseline's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from giornata.planning.batch import BatchPlanner, plan_batch
from giornata.planning.costs import StepCosts, Work
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.blocks.loads import LoadsAhead

UNKNOWN: Final = StepCosts((0.0, 0.0, 1.0, 0.3, 0.0))
"""Of a machine that nobody measured: computing counts tokens, loading nothing."""


class CostModel(Protocol):
    """What steps cost on this machine, and who is told what they did cost."""

    @property
    def costs(self) -> StepCosts:
        """As they are known now."""

    def observe_step(self, work: Work, step_ms: float) -> object:
        """A step that had nothing to load computed `work` in `step_ms`."""


class Guess:
    """The costs of a machine that nobody measures."""

    costs: Final = UNKNOWN

    def observe_step(self, work: Work, step_ms: float) -> None:
        """Nobody learns from it."""


@dataclass(frozen=True, eq=False)
class ReuseOptions:
    """How an engine reuses templates, and by what it knows their worth.

    The baselines of the benchmarks are other values of these.
    """

    loader: LoadsAhead | None = None
    """Loads ahead what rows take; without it a block's load is waited for when the block begins."""
    model: CostModel = field(default_factory=Guess)
    planner: BatchPlanner = plan_batch
    device: Device | None = None
    """How loads get to the engine's device; None where it is the CPU."""
    ahead_bytes: int = 1 << 30
    """Most slabs that are loaded for later steps."""
    correction_bits: int | None = 8
    """Rows compute their first step in full and correct what they take by it, kept in so many bits; None corrects
    nothing, as FlashPS.
    """
