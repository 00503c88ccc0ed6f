"""What simulated clients ask for: requests of the load generator as rows of tokens. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.occupancy import Attempt
from giornata_lab.loadgen.workload import WorkloadRequest

MODEL = "simulated"
DIGEST = "0" * 64
DEFAULT_STEPS = 30


def digest_of(model: str) -> str:
    """The digest that a simulated model of this name has."""
    return DIGEST if model == MODEL else hashlib.sha256(model.encode()).hexdigest()


@dataclass(frozen=True)
class PictureSetting:
    """The size in tokens that all jobs edit, a square picture, and how their rows reuse."""

    text: int = 512
    image: int = 4096
    halo: int = 0
    """Tokens around a mask that are computed too."""
    corrects: bool = False
    """Rows compute their first step in full and correct what they take by it; FlashPS does not."""
    padding: int = 0
    """Text tokens that pad the prompt: rows that reuse compute them in their first step alone, if at all."""

    def computed(self, mask_ratio: float) -> int:
        """Tokens that a square mask touches with its halo, at least one."""
        side = math.sqrt(self.image * mask_ratio) + 2 * self.halo
        return max(1, min(self.image, round(side * side)))


@dataclass(frozen=True)
class SimulatedJob:
    """One request."""

    job_id: str
    at_s: float
    demand: JobDemand
    slo_s: float | None = None
    """Time from its arrival in which it should end."""


@dataclass(frozen=True)
class SimAssignment:
    """Rows of a job that one worker gets together."""

    job: SimulatedJob
    attempt: int
    rows: tuple[int, ...]

    @property
    def key(self) -> Attempt:
        """Job and attempt."""
        return self.job.job_id, self.attempt

    @property
    def demand(self) -> JobDemand:
        """What its rows ask for."""
        return replace(self.job.demand, shapes=tuple(self.job.demand.shapes[row] for row in self.rows))


def jobs_of(
    requests: Sequence[WorkloadRequest],
    picture: PictureSetting,
    *,
    reuse: bool = True,
    slo_s: float | None = None,
) -> list[SimulatedJob]:
    """Make a job of every request, in the order of their times; with `reuse` they may take from templates."""
    made = []
    for number, request in enumerate(sorted(requests, key=lambda r: r.at_s)):
        computed = picture.computed(request.mask_ratio) if reuse else picture.image
        steps = request.steps or DEFAULT_STEPS
        shape = RowShape(
            picture.text,
            picture.image,
            computed,
            steps,
            begun=not picture.corrects,
            padding=picture.padding if reuse else 0,
        )
        template = template_name(request.template) if reuse else None
        demand = JobDemand(MODEL, DIGEST, (shape,) * request.n, template)
        made.append(SimulatedJob(f"j{number}", request.at_s, demand, slo_s))
    return made


def template_name(number: int) -> str:
    """The name of a template in telemetry."""
    return f"t{number}"
