"""Workers as the simulator knows them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from giornata.planning.cost_model import Profile, encode_compute_fit, fit
from giornata.planning.operations import (
    NetworkOperations,
    SequenceShape,
    StepCosts,
    step_work,
    work_of_weights,
)
from giornata.scheduling.demand import StepTimeModel
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata.wire.workers import CostFit, WorkerCosts

DERIVED: Final = Path(__file__).with_name("h100.json")
"""The profile of an H100 whose times are derived."""


@cache
def derived() -> Profile:
    """What the file says."""
    return Profile.model_validate_json(DERIVED.read_bytes())


FIGURES: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
FLUX: Final = FIGURES["models"]["flux"]
FLUX_BLOCKS: Final = NetworkOperations(
    [
        BlockSpec(
            linear=FLUX["token_weights"] * FLUX["width"] ** 2,
            text=FLUX["token_weights"] * FLUX["width"] ** 2,
            outside=2.0 * FLUX["width"] ** 2,
            pair=2.0 * FLUX["width"],
            text_pair=2.0 * FLUX["width"],
            count=FLUX["blocks"],
        )
    ]
)
"""A token meets 12 width² weights in either kind of block (double: queries, keys and values 3, projection 1,
feed-forward 8; single: 7 in and 5 out). A pair of query and key takes 2 width, both products. To project a token's keys
and values again takes 2 width²."""
TOKEN_BLOCKS: Final = NetworkOperations(
    [BlockSpec(linear=1 / FLUX["blocks"], text=1 / FLUX["blocks"], count=FLUX["blocks"])]
)
"""The same number of blocks, which count a computed token as one operation and nothing else."""


@dataclass(frozen=True)
class TemplateStorage:
    """What a worker keeps of templates, and how fast it reads them from disk."""

    memory_bytes: float = math.inf
    disk_bytes: float = 0.0
    disk_bytes_per_s: float = 2e9


@dataclass(frozen=True)
class Machine:
    """One worker: what its steps cost, how many rows and tokens share one at most, what it keeps."""

    costs: StepCosts
    """`load` all 0: loads from memory hide behind computing and are not planned."""
    operations: NetworkOperations
    """What the blocks of the network compute."""
    device: str = "machine"
    rows: int = 8
    tokens: int = 1 << 40
    slowness: float = 1.0
    """How many times slower this worker is than `costs`."""
    storage: TemplateStorage = field(default_factory=TemplateStorage)
    controls: tuple[tuple[str, int], ...] = ()
    """Digests and bytes of the ControlNets that it computes itself."""

    @property
    def speed(self) -> float:
        """Return how fast it computes a token without a template, to compare machines."""
        token_ms = self.costs.compute[2] * self.slowness
        return 1 / token_ms if token_ms else 1.0

    @property
    def pace(self) -> StepTimeModel:
        """Return what steps really cost."""
        return StepTimeModel(
            self.costs,
            self.operations,
            keeps_padding=True,
            slowness=self.slowness,
            controls=tuple((digest, work_of_weights(size, shared=True)) for digest, size in self.controls),
        )

    @property
    def told(self) -> WorkerCosts:
        """Return what telemetry tells: the costs without the worker's slowness, which the router has to find out."""
        compute, load = (
            CostFit(weights=weights, r2=1.0, residual_ms=0.0, samples=0, outliers=0)
            for weights in (self.costs.compute, self.costs.load)
        )
        return WorkerCosts(
            compute=encode_compute_fit(compute), load=load, device=self.device, keeps_padding=True
        )


def h800_flux(rows: int = 8) -> Machine:
    """One H800 with Flux at 1024 x 1024, by its published step times; `rows` share a step at most.

    The times of full batches are fitted by a constant a step and a constant a picture (relative least squares). The
    time of a picture is then spread over its multiplications, at one speed for all of them.
    """
    rows_a_step = np.vander(FIGURES["batches"], 2, increasing=True)
    step_ms, picture_ms = fit(
        ("step", "picture"), rows_a_step, np.array(FLUX["step_ms"]), relative=True
    ).weights
    whole = SequenceShape(FLUX["text_tokens"], FLUX["image_tokens"], FLUX["image_tokens"])
    work = step_work(FLUX_BLOCKS, [whole], [(BlockMode.FULL,) * FLUX_BLOCKS.blocks])
    one_ms = picture_ms / (work.linear + work.attention)
    return Machine(StepCosts((step_ms, 0.0, one_ms, one_ms, 0.0, 0.0)), FLUX_BLOCKS, "NVIDIA H800", rows)


def flashps_flux(rows: int = 8) -> Machine:
    """One H800 as FlashPS uses it: its step times with reuse, loads within them, instead of full pictures' scaled down.

    A row costs a constant and its share of the picture. So a masked row alone is less faster than a full one than where
    the times of full pictures are scaled by the tokens that are computed (:func:`h800_flux`).
    """
    fitted = FIGURES["fitted"]["flux"]
    token_ms = fitted["ratio_ms"] / FLUX["image_tokens"]
    sequence_ms = fitted["row_ms"] - FLUX["text_tokens"] * token_ms
    adapter_ms = token_ms / FLUX_BLOCKS.total[1, 1]  # a multiplication, of all that a token meets
    weights = (fitted["step_ms"], sequence_ms, token_ms, 0.0, 0.0, 0.0, adapter_ms, 0.0, adapter_ms)
    return Machine(StepCosts(weights), TOKEN_BLOCKS, "NVIDIA H800, FlashPS", rows)


def of_profile(profile: Profile) -> Machine:
    """One device, as a profile has it measured or derived."""
    return Machine(profile.costs, NetworkOperations(profile.blocks), profile.device)


PUBLISHED: Final[dict[str, Callable[[], Machine]]] = {
    "h800-flux": h800_flux,
    "flashps-flux": flashps_flux,
    "h100": lambda: of_profile(derived()),
}
