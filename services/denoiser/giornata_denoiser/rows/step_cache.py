"""Step caches of rows: by which rule a row computes fewer blocks, and what it remembers for that. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from giornata.packed.first_block import Remembered


@dataclass(frozen=True)
class FirstBlockRule:
    """A sequence passes the first block alone while that adds nearly what it added in its last whole forward."""

    threshold: float
    """The largest relative change, by L1 norms."""


@dataclass(frozen=True)
class TaylorRule:
    """All but some steps take an output that is extrapolated from those of the steps that were computed.

    TaylorSeer (Liu et al., ICCV 2025) on the network's output: `TaylorSeerCacheConfig` of diffusers with
    `use_lite_mode`, and the same steps.
    """

    interval: int
    """Of so many steps one is computed."""
    order: int
    """Of the highest finite difference."""
    warmup: int
    """All first steps are computed, so many of those that a row makes here."""

    def computes(self, step: int) -> bool:
        """Whether the step is computed, the 0th being the first one that the row makes here."""
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0

    def computed_steps(self, steps: int) -> int:
        """How many of a row's first so many steps are computed."""
        return sum(map(self.computes, range(steps)))


Rule = FirstBlockRule | TaylorRule


@dataclass(frozen=True, eq=False)
class Expansion:
    """A row's outputs of the network, extrapolated by finite differences."""

    began: int
    """The row's step from which on it is made."""
    step: int
    """The last computed step."""
    factors: tuple[Tensor, ...]
    """(sequences, computed, channels) float32 each: the output, and its differences a step, order by order."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(factor.nbytes for factor in self.factors)

    def at(self, step: int) -> Tensor:
        """(sequences, computed, channels) float32: what the network is taken to answer in a later step."""
        ahead = step - self.step
        first, *others = self.factors
        found = first
        for order, factor in enumerate(others, 1):
            found = found + factor * (ahead**order / math.factorial(order))
        return found


def expanded(before: Expansion | None, step: int, output: Tensor, order: int) -> Expansion:
    """`before` with the output, (sequences, computed, channels), of a computed step; made again where shapes differ."""
    factors = [output.float()]
    if before is not None and before.factors[0].shape == output.shape:
        for known in before.factors[:order]:
            factors.append((factors[-1] - known) / (step - before.step))
        return Expansion(before.began, step, tuple(factors))
    return Expansion(step, step, tuple(factors))


Cached = tuple[Remembered, ...] | Expansion
"""What a row remembers of its computed steps: by sequence its last whole forward, or an expansion of its outputs."""
