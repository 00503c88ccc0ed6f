"""Workers as the simulator knows them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from giornata.planning.costs import StepCosts
from giornata.planning.profile import Profile
from giornata.scheduling.demand import Pace
from giornata.wire.values import Mode
from giornata.wire.workers import CostFit, WorkerCosts


@dataclass(frozen=True)
class Storage:
    """What a worker keeps of templates."""

    memory_bytes: float = math.inf
    disk_bytes: float = 0.0
    disk_bytes_per_s: float = 2e9
    """At which it reads."""


@dataclass(frozen=True)
class Machine:
    """One worker: what its steps cost, how many rows share them, what it keeps."""

    costs: StepCosts
    """`load` all 0: loads from memory hide behind computing and are not planned."""
    blocks: int
    """Of the transformer; `costs` are those of one block, but for a step's own."""
    device: str = "machine"
    rows: int = 8
    """That share a step, at most."""
    tokens: int = 1 << 40
    """Likewise."""
    step_limit_ms: float = math.inf
    """Rows share a step only while it is predicted to take no longer than this; one row may always run."""
    reused: Mode = Mode.KV
    """How rows take from templates."""
    slowness: float = 1.0
    """By which this worker is slower than `costs`."""
    noise: float = 0.0
    """Coefficient of variation of the times of equal steps; lognormal, each step by itself."""
    busy: tuple[tuple[float, float], ...] = ()
    """From when until when, in seconds, no step begins."""
    storage: Storage = field(default_factory=Storage)

    @classmethod
    def of(cls, profile: Profile, rows: int = 8) -> Machine:
        """As `giornata profile` measured it."""
        return cls(profile.costs, profile.blocks, profile.device, rows)

    @property
    def pace(self) -> Pace:
        """What steps really cost."""
        return Pace(self.costs, self.blocks, self.reused, self.slowness)

    @property
    def told(self) -> WorkerCosts:
        """What telemetry tells: the costs without how much slower this worker is, which has to be found out."""
        compute, load = (
            CostFit(weights=weights, r2=1.0, residual_ms=0.0, samples=0, outliers=0)
            for weights in (self.costs.compute, self.costs.load)
        )
        return WorkerCosts(
            compute=compute, load=load, blocks=self.blocks, device=self.device, reused=self.reused
        )
