"""Workers as the simulator knows them; one has published step times: an H800 with Flux, 1024 x 1024. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from giornata.planning.costs import StepCosts
from giornata.planning.profile import Profile
from giornata.planning.regression import fit
from giornata.scheduling.demand import Pace
from giornata.wire.workers import CostFit, WorkerCosts
from giornata_tools.simulation.jobs import PictureSetting

FIGURES: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
FLUX: Final = FIGURES["models"]["flux"]
FLUX_PICTURE: Final = PictureSetting(FLUX["text_tokens"], FLUX["image_tokens"])
DECODE_MS: Final = float(FLUX["decode_ms"][0])
"""Decoding of one picture at a time."""


@dataclass(frozen=True)
class Storage:
    """What a worker keeps of templates, and how fast it reads them from disk."""

    memory_bytes: float = math.inf
    disk_bytes: float = 0.0
    disk_bytes_per_s: float = 2e9


@dataclass(frozen=True)
class Machine:
    """One worker: what its steps cost, how many rows and tokens share one at most, what it keeps."""

    costs: StepCosts
    """`load` all 0: loads from memory hide behind computing and are not planned."""
    blocks: int
    """Blocks of the transformer; all `costs` but the base of a step are costs of one block."""
    device: str = "machine"
    rows: int = 8
    tokens: int = 1 << 40
    step_limit_ms: float = math.inf
    """Rows share a step only while it is predicted to take no longer than this; one row may always run."""
    slowness: float = 1.0
    """How many times slower this worker is than `costs`."""
    noise: float = 0.0
    """Coefficient of variation of the times of equal steps; lognormal, each step by itself."""
    busy: tuple[tuple[float, float], ...] = ()
    """From when until when, in seconds, no step begins."""
    storage: Storage = field(default_factory=Storage)

    @classmethod
    def of(cls, profile: Profile) -> Machine:
        """A worker as `giornata profile` measured it."""
        return cls(profile.costs, profile.blocks, profile.device)

    @property
    def pace(self) -> Pace:
        """What steps really cost."""
        return Pace(self.costs, self.blocks, slowness=self.slowness)

    @property
    def told(self) -> WorkerCosts:
        """What telemetry tells: the costs without the worker's slowness, which the router has to find out."""
        compute, load = (
            CostFit(weights=weights, r2=1.0, residual_ms=0.0, samples=0, outliers=0)
            for weights in (self.costs.compute, self.costs.load)
        )
        return WorkerCosts(compute=compute, load=load, blocks=self.blocks, device=self.device)


def h800_flux(rows: int = 8) -> Machine:
    """One H800 with Flux; `rows` share a step at most.

    The times of full batches are fitted by a constant a step and a constant a picture (relative least squares). The
    time of a picture is then split as its operations are, at one speed for all of them. A token costs 2 FLOP for each
    of the weights that it meets in a block: 12 width² in either kind of block (double: queries, keys and values 3,
    projection 1, feed-forward 8; single: 7 in and 5 out). A pair of query and key costs 4 width (both products). To
    project a token's keys and values again costs 4 width².
    """
    rows_a_step = np.vander(FIGURES["batches"], 2, increasing=True)
    step_ms, picture_ms = fit(
        ("step", "picture"), rows_a_step, np.array(FLUX["step_ms"]), relative=True
    ).weights
    tokens = FLUX["image_tokens"] + FLUX["text_tokens"]
    per_token, per_pair = 2 * FLUX["token_weights"] * FLUX["width"] ** 2, 4 * FLUX["width"]
    per_projection = 4 * FLUX["width"] ** 2
    flop_ms = picture_ms / FLUX["blocks"] / (tokens * per_token + tokens**2 * per_pair)
    weights = (step_ms, 0.0, flop_ms * per_token, flop_ms * per_projection, flop_ms * per_pair)
    return Machine(StepCosts(weights), FLUX["blocks"], "NVIDIA H800", rows)
