"""Fits costs by degree to :mod:`giornata_lab.simulation.degrees.derived`, for profiles that ship.

``python -m giornata_lab.simulation.degrees.fitting`` makes their files again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from giornata.planning.costs import LOAD, completed
from giornata.planning.degrees import DegreeFit
from giornata.planning.operations import ADAPTING, COMPUTE, NETWORK, SequenceShape, step_work
from giornata.planning.profiles import Profile
from giornata.planning.regression import LinearFit, fit
from giornata.scheduling.degrees.pool import DEGREES
from giornata.wire.values import BlockMode
from giornata_lab.loadgen import facts
from giornata_lab.simulation.degrees import derived
from giornata_lab.simulation.h100 import MACHINES, path
from giornata_lab.simulation.machines import FLUX_BLOCKS

SIDES: Final = (256, 512, 768, 1024, 1280, 1536, 2048)
"""Pixels a side of the pictures that are fitted."""
TOKEN_PIXELS: Final = 16
COUNTS: Final = (1, 2, 4, 8)
"""Alike rows of a step."""
MOST_ROW_TOKENS: Final = 16384
"""Tokens of the pictures of several rows together: larger steps are none that rows share."""
MASKS: Final = 8
"""Every so many percentiles of production's masks."""
DIGITS: Final = 6
"""Significant digits of what is written: the last ones of a float are those of a processor."""


@dataclass(frozen=True)
class DerivedStep:
    """A step of alike rows."""

    image: int
    """Tokens of a row's picture."""
    computed: int
    rows: int = 1

    def seconds(self, degree: int, *, eager: bool) -> float:
        """By the formula."""
        own, every = derived.TEXT + self.computed, derived.TEXT + self.image
        operations = self.rows * (derived.LINEAR * own + derived.PAIR * own * every)
        alone = derived.batch_s(degree, self.rows * own, operations)
        if not eager:
            return alone
        return derived.EAGER * (alone + (derived.EAGER_S if degree > 1 else 0.0))

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of :data:`giornata.planning.operations.NETWORK`."""
        mode = BlockMode.KV if self.computed < self.image else BlockMode.FULL
        shape = SequenceShape(derived.TEXT, self.image, self.computed)
        work = step_work(FLUX_BLOCKS, [shape] * self.rows, [(mode,) * FLUX_BLOCKS.blocks] * self.rows)
        return work.features[: len(NETWORK)]


def steps() -> Iterator[DerivedStep]:
    """What is fitted: pictures of which all or a production's mask is computed, alone and as many as share a step.

    A whole picture counts as often as a masked one.
    """
    ratios = facts.MASK_RATIOS["production"][1:-1:MASKS]
    for side in SIDES:
        image = (side // TOKEN_PIXELS) ** 2
        masked = [max(1, round(ratio * image)) for ratio in ratios]
        for computed in (*masked, *(image,) * len(masked)):
            for rows in COUNTS:
                if rows == 1 or rows * image <= MOST_ROW_TOKENS:
                    yield DerivedStep(image, computed, rows)


def made(name: str) -> Profile:
    """The profile of a machine of :data:`MACHINES`."""
    fitted, eager = list(steps()), MACHINES[name]
    features = np.array([step.features for step in fitted])
    fits = {
        degree: _fit(features, [step.seconds(degree, eager=eager) for step in fitted]) for degree in DEGREES
    }
    return Profile(
        model="Flux.1-dev",
        model_digest="derived",
        device=f"NVIDIA H100, {'not ' if eager else ''}compiled",
        dtype="bfloat16",
        versions={},
        measured_on="never",
        blocks=FLUX_BLOCKS.specs,
        compute=fits[1],
        degrees=tuple(DegreeFit(degree=degree, compute=fits[degree]) for degree in DEGREES[1:]),
        load=_free_loads(),
        activation_bytes=0.0,
        derived="published times of xDiT on one, two and four H100s, by a formula",
    )


def _fit(features: np.ndarray, seconds: Sequence[float]) -> LinearFit:
    """(samples, network's features) to one way's times; what adapters add follows from the others."""
    found = fit(NETWORK, features, np.array(seconds) * 1e3, relative=True)
    graded = {name: _rounded(value) for name, value in found.model_dump().items() if isinstance(value, float)}
    weights = tuple(map(_rounded, completed(found.weights)))
    return found.model_copy(update={**graded, "names": COMPUTE, "weights": weights, "derived": ADAPTING})


def _free_loads() -> LinearFit:
    """Loads hide behind computing: the formula knows none."""
    return LinearFit(
        names=LOAD,
        weights=(0.0,) * len(LOAD),
        r2=1.0,
        residual_ms_p50=0.0,
        residual_ms_p95=0.0,
        samples=0,
        derived=LOAD,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    for machine in MACHINES:
        path(machine).write_text(made(machine).model_dump_json(indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path(machine)}\n")
