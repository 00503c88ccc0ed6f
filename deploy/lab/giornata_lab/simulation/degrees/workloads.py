"""Pictures that a simulated pool is asked for: those of TetriServe's evaluation, or edits with production's masks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from giornata_lab.loadgen import workload

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
