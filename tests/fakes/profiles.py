"""A machine that nobody has measured."""

from __future__ import annotations

from typing import Final

from giornata.planning.cost_model import CostModel, LinearFit, Profile
from giornata.planning.operations import COMPUTE, LOAD, StepWork
from giornata_lab.bench.systems.networks import plain

WEIGHTS: Final = (2.0, 0.4, 1e-6, 2e-6, 0.0, 0.0)
LOAD_WEIGHTS: Final = (0.05, 1e-6)


def record(names: tuple[str, ...], weights: tuple[float, ...]) -> LinearFit:
    return LinearFit(
        names=names, weights=weights, r2=0.99, residual_ms_p50=0.5, residual_ms_p95=1.5, samples=40
    )


PROFILE: Final = Profile(
    model="tiny",
    model_digest="d",
    device="a processor",
    dtype="float32",
    versions={"torch": "2"},
    measured_on="2026-11-21",
    blocks=plain(4),
    compute=record(COMPUTE, WEIGHTS),
    load=record(LOAD, LOAD_WEIGHTS),
    activation_bytes=4096.0,
)


class Steady(CostModel):
    """Tells what it observes, and decides by the profile: no edit skips a template because a busy machine was slow."""

    def observe_step(self, work: StepWork, step_ms: float, *, degree: int = 1, halves: bool = False) -> bool:
        costs, ways = self.costs, self.ways
        taken = super().observe_step(work, step_ms, degree=degree, halves=halves)
        self.costs, self.ways = costs, ways
        return taken
