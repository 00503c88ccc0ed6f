"""Pictures that a simulated pool is asked for, and what their steps take, derived and not measured.

Pictures are those of TetriServe's evaluation, or edits with production's masks. Step times are of Flux.1-dev on H100s;
for the profile that ships they are fitted: ``python -m giornata_lab.simulation.degrees.workloads`` makes its file.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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
from giornata_lab.simulation.machines import DERIVED, FLUX_BLOCKS

SLO_S: Final[Mapping[int, float]] = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}
"""Seconds from arrival to the last step by pixels a side, at scale 1 (TetriServe, section 6.1)."""
LARGEST: Final = 2048
PATCH: Final = 16
"""Pixels a side of a token."""
MASKED_SIZES: Final = (512, 1024, 2048)
SHAPE_TOKENS: Final = 64
"""Computed tokens are rounded up to a multiple, so that there are few shapes."""
HALO: Final = 1
"""Tokens around a mask that are computed too."""
SKEW_TOKENS: Final = 16384
"""The skewed mix draws a size in proportion to exp(tokens / this)."""


class SizeMix(StrEnum):
    """Which sizes are asked for."""

    UNIFORM = "uniform"
    SKEWED = "skewed"
    """Large ones more often."""


@dataclass(frozen=True, slots=True)
class PoolRowSize:
    """What tells a row's step times: pictures of one resolution of which as many tokens are computed."""

    side: int
    """Pixels."""
    computed: int
    """Tokens of the picture that a step computes; a step in full computes all."""

    @property
    def tokens(self) -> int:
        """Tokens of the picture."""
        return tokens_of(self.side)

    @property
    def masked(self) -> bool:
        """Return whether other tokens are taken from a template."""
        return self.computed < self.tokens


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A picture that a client asks for."""

    number: int
    at_s: float
    due_s: float
    """When the last step has to end."""
    size: PoolRowSize
    steps: int


@dataclass(frozen=True)
class PoolWorkload:
    """What is asked of a pool; equal values draw equal requests."""

    mix: SizeMix = SizeMix.UNIFORM
    scale: float = 1.0
    """By which the deadlines are longer than :data:`SLO_S`."""
    per_minute: float = 12.0
    cv: float = 1.0
    """Coefficient of variation of the times between arrivals: 1 is Poisson, more a balanced hyper-exponential."""
    steps: int = 50
    requests: int = 300
    masks: str | None = None
    """A trace of :data:`giornata_lab.loadgen.workload.MASK_RATIOS` that the masks come from; None: whole pictures."""
    in_full: bool = False
    """Whether masks are drawn and not used: every step computes all tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cv < 1:
            raise ValueError(f"received a coefficient of variation of {self.cv:g}; accepted are 1 and more")

    @property
    def name(self) -> str:
        """Name of its sizes or masks."""
        return self.masks or str(self.mix)

    def draw(self) -> list[PoolRequest]:
        """The requests in the order of their arrival."""
        chance = random.Random(self.seed)  # noqa: S311 - a workload, no secret
        draw_size = self._masked if self.masks else self._whole
        now, made = 0.0, []
        for number in range(self.requests):
            now += self._gap_s(chance)
            size = draw_size(chance)
            made.append(PoolRequest(number, now, now + SLO_S[size.side] * self.scale, size, self.steps))
        return made

    def _gap_s(self, chance: random.Random) -> float:
        mean = 60 / self.per_minute
        if self.cv == 1:
            return chance.expovariate(1 / mean)
        squared = self.cv * self.cv
        short = 0.5 * (1 + math.sqrt((squared - 1) / (squared + 1)))
        share = short if chance.random() < short else 1 - short
        return chance.expovariate(2 * share / mean)

    def _whole(self, chance: random.Random) -> PoolRowSize:
        weights = mix_weights(self.mix)
        (side,) = chance.choices(list(weights), list(weights.values()))
        return PoolRowSize(side, tokens_of(side))

    def _masked(self, chance: random.Random) -> PoolRowSize:
        side = chance.choice(MASKED_SIZES)
        tokens = tokens_of(side)
        ratios = workload.MASK_RATIOS[self.masks or ""]
        ratio = ratios[chance.randrange(1, len(ratios) - 1)]
        return PoolRowSize(side, tokens if self.in_full else computed_tokens(ratio, tokens))


def tokens_of(side: int) -> int:
    """Tokens of a square picture of `side` pixels."""
    return (side // PATCH) ** 2


def mix_weights(mix: SizeMix) -> Mapping[int, float]:
    """Chances by pixels a side; they sum to 1."""
    weights = {s: math.exp(tokens_of(s) / SKEW_TOKENS) if mix is SizeMix.SKEWED else 1.0 for s in SLO_S}
    total = sum(weights.values())
    return {side: weight / total for side, weight in weights.items()}


def computed_tokens(ratio: float, tokens: int) -> int:
    """Tokens that a step computes under a square mask of so much of the picture, halo and rounding included."""
    touched = math.ceil(ratio * tokens)
    haloed = min(tokens, round((math.sqrt(touched) + 2 * HALO) ** 2))
    return min(tokens, -(-haloed // SHAPE_TOKENS) * SHAPE_TOKENS)


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
