"""Step times of simulated pools: derived for Flux.1-dev on H100s, and fitted for profiles that ship."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import numpy as np

from giornata.planning.cost_model import DegreeFit, LinearFit, Profile, fit
from giornata.planning.operations import (
    ADAPTING,
    COMPUTE,
    LOAD,
    NETWORK,
    SequenceShape,
    complete_weights,
    step_work,
)
from giornata.scheduling.degrees.pool import DEGREES, PoolRow, Times
from giornata.wire.values import BlockMode
from giornata_lab.loadgen import workload
from giornata_lab.simulation.degrees.workloads import PoolRowSize
from giornata_lab.simulation.machines import DERIVED, FLUX_BLOCKS

# Step times of Flux.1-dev on several H100s, derived or fitted and not measured.


TEXT: Final = 512
"""Tokens of a prompt."""
LINEAR: Final = 12.9e9
"""Operations of a token, two for each multiplication of the linear layers."""
PAIR: Final = 7.0e5
"""Operations of a pair of tokens in all attentions."""
HALF_RATE_TOKENS: Final = 150
"""Tokens of a device at which it reaches half of its rates."""
BLOCKS: Final = 57
TOKEN_BYTES: Final = 24576
"""That a token sends in a block: query, key, value and what is attended, in 16 bits."""


@dataclass(frozen=True)
class StepFormula:
    """What tells the seconds of a step on several devices from its tokens."""

    fixed_s: float
    """That no degree shortens."""
    linear: float
    """Operations a second in linear layers, of one device that has many tokens."""
    attention: float
    """The same in attention."""
    calls_s: float
    """Time of a block's collectives on two devices, beside that of their bytes."""
    doubling_s: float = 0.0
    """It grows by this much each time that the devices double."""
    link: float = 350e9
    """Bytes a second from device to device."""


COMPILED: Final = StepFormula(5e-3, 548e12, 548e12, 100e-6)
"""Gives xDiT's published compiled times at 1024² (4.30, 2.68 and 1.63 s for 28 steps on one, two and four)."""
EAGER: Final = StepFormula(
    5e-3 * 1.1, 548e12 / 1.1, 548e12 / 1.1, (100e-6 + 8e-3 / BLOCKS) * 1.1, link=350e9 / 1.1
)
"""Supposed of an engine that is not compiled: a tenth more, and 8 ms for several devices."""
TETRISERVE: Final = StepFormula(2.38e-3, 700e12, 300e12, 144e-6, 144e-6)
"""Found by :mod:`giornata_lab.simulation.degrees.fit`; it agrees with most that TetriServe's paper says."""
FORMULAS: Final = {"h100": COMPILED, "h100-eager": EAGER, "tetriserve": TETRISERVE}
"""By the name of the machine."""


@cache
def step_s(formula: StepFormula, parts: tuple[tuple[int, int], ...], degree: int) -> float:
    """Seconds of a step on so many H100s.

    Args:
        formula: of the machine.
        parts: of each row the tokens of its picture that it computes, and all of them.
        degree: devices that share it.
    """
    own = sum(TEXT + computed for computed, _ in parts)
    pairs = sum((TEXT + computed) * (TEXT + tokens) for computed, tokens in parts)
    share = own / degree
    filled = share / (share + HALF_RATE_TOKENS)
    computing = (LINEAR * own / formula.linear + PAIR * pairs / formula.attention) / degree / filled
    if degree == 1:
        return formula.fixed_s + computing
    calls = formula.calls_s + formula.doubling_s * (math.log2(degree) - 1)
    moved = TOKEN_BYTES * share * (degree - 1) / degree / formula.link
    return formula.fixed_s + computing + BLOCKS * (calls + moved)


# What steps of a simulated pool's rows take: alone, moved to other devices, and together.


MOST_ROWS: Final = 8
"""Rows that share a step."""


@cache
def times(formula: StepFormula, size: PoolRowSize, degrees: tuple[int, ...]) -> Times:
    """Seconds of a step by degree."""
    return {k: step_s(formula, ((size.computed, size.tokens),), k) for k in degrees}


@cache
def moved_times(formula: StepFormula, size: PoolRowSize, degrees: tuple[int, ...]) -> Times:
    """Seconds of the first step, and of one on other devices: it computes all tokens."""
    return times(formula, PoolRowSize(size.side, size.tokens), degrees)


def shared_s(formula: StepFormula, parts: Sequence[tuple[PoolRowSize, bool]], degree: int) -> float:
    """Seconds of a step of several rows, each of which computes its tokens or, where told so, all of its picture."""
    tokens = sorted((s.tokens if full else s.computed, s.tokens) for s, full in parts)
    return step_s(formula, tuple(tokens), degree)


def together(formula: StepFormula, rows: Sequence[PoolRow], degree: int) -> float | None:
    """Seconds of a step of `rows`; see :class:`giornata.scheduling.degrees.pool.SharedStepTime`."""
    if len(rows) > MOST_ROWS:
        return None
    return shared_s(formula, [(cast("PoolRowSize", row.size), False) for row in rows], degree)


# Fits costs by degree to `giornata_lab.simulation.degrees.step_times`, for the profile that ships.
#
# ``python -m giornata_lab.simulation.degrees.step_times`` makes its file again.


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

    def seconds(self, degree: int) -> float:
        """By the formula."""
        return step_s(COMPILED, ((self.computed, self.image),) * self.rows, degree)

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of :data:`giornata.planning.operations.NETWORK`."""
        mode = BlockMode.KV if self.computed < self.image else BlockMode.FULL
        shape = SequenceShape(TEXT, self.image, self.computed)
        work = step_work(FLUX_BLOCKS, [shape] * self.rows, [(mode,) * FLUX_BLOCKS.blocks] * self.rows)
        return work[: len(NETWORK)]


def steps() -> Iterator[DerivedStep]:
    """What is fitted: pictures of which all or a production's mask is computed, alone and as many as share a step.

    A whole picture counts as often as a masked one.
    """
    ratios = workload.MASK_RATIOS["production"][1:-1:MASKS]
    for side in SIDES:
        image = (side // TOKEN_PIXELS) ** 2
        masked = [max(1, round(ratio * image)) for ratio in ratios]
        for computed in (*masked, *(image,) * len(masked)):
            for rows in COUNTS:
                if rows == 1 or rows * image <= MOST_ROW_TOKENS:
                    yield DerivedStep(image, computed, rows)


def made() -> Profile:
    """The profile of an H100 whose engine is compiled."""
    fitted = list(steps())
    features = np.array([step.features for step in fitted])
    fits = {degree: _fit(features, [step.seconds(degree) for step in fitted]) for degree in DEGREES}
    return Profile(
        model="Flux.1-dev",
        model_digest="derived",
        device="NVIDIA H100, compiled",
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
    weights = tuple(map(_rounded, complete_weights(found.weights)))
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
    DERIVED.write_text(made().model_dump_json(indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{DERIVED}\n")
