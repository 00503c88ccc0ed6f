"""What a job asks of whichever worker gets it, and what that costs there. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from giornata.planning.costs import Shape, StepCosts
from giornata.scheduling.backlog import RowLoad
from giornata.wire.values import Mode

UNIT: Final = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0))
"""A millisecond a token: for workers that have told nothing; they are then compared by the tokens that they compute."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps cost on one worker."""

    costs: StepCosts = UNIT
    blocks: int = 1
    """Of the transformer; costs are those of one block, but for a step's own."""
    reused: Mode = Mode.KV
    """How rows take from templates there."""
    slowness: float = 1.0
    """By which this worker is slower than `costs`, which are those of all workers of its kind."""
    loading: float = 1.0
    """By which rows that take from templates take longer there than to compute the least, as its planner expects."""

    @property
    def base_ms(self) -> float:
        """Of a step, whatever is in it."""
        return self.slowness * self.costs.compute[0]

    def row_ms(self, shape: Shape, sequences: int, mode: Mode) -> float:
        """What a row adds to a step."""
        return self.slowness * self.costs.block_ms(shape.work(mode)) * sequences * self.blocks


@dataclass(frozen=True, slots=True)
class RowShape:
    """One row, as far as its cost depends on it."""

    text: int
    """Tokens."""
    image: int
    """Tokens."""
    computed: int
    """Image tokens that are computed where the template is at hand, halo included."""
    steps: int
    """Still to compute."""
    sequences: int = 1
    """2 with true classifier-free guidance."""
    begun: bool = False
    """Where it is it has made a step already, so that its next one is as the others."""

    def load(self, pace: Pace, *, reuses: bool) -> RowLoad:
        """On a worker of this pace."""
        shape = Shape(self.text, self.image, self.computed)
        full_ms = pace.row_ms(shape, self.sequences, Mode.FULL)
        tokens = self.sequences * (self.text + self.image)
        whole = RowLoad(self.steps, full_ms, tokens=tokens)
        if not reuses or self.computed >= self.image:
            return whole
        masked_ms = pace.loading * pace.row_ms(shape, self.sequences, pace.reused)
        if masked_ms >= full_ms:  # above the crossover the worker does not reuse
            return whole
        masked = self.sequences * (self.text + self.computed)
        if self.begun:
            return RowLoad(self.steps, masked_ms, tokens=masked)
        return RowLoad(self.steps, masked_ms, full_ms - masked_ms, masked, tokens - masked)


def with_halo(touched: int, halo: int, image: int) -> int:
    """How many of `image` tokens are computed where a mask touches `touched`: as if it were a square.

    Args:
        touched: tokens that the mask touches.
        halo: tokens around it that are computed too.
        image: tokens of the picture.
    """
    side = math.sqrt(touched)
    return min(image, round((side + 2 * halo) ** 2)) if touched else 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks of a worker."""

    model: str
    model_digest: str
    shapes: tuple[RowShape, ...]
    """Of the rows that are still to be computed."""
    template: str | None = None
    """Key of the template that they may take from; None where they do not reuse."""
    ticket: int = 0
    """Counts jobs in order of arrival."""
    within_ms: float | None = None
    """From now, in which the client wants its rows computed."""
    together: bool = False
    """Its rows go to one worker; otherwise they may be computed by several."""
    alone: bool = False
    """It may share a worker with nobody: it is suspected of having brought others down."""

    def piece(self) -> Demand:
        """What is placed at once: its first row, or all where they stay together."""
        whole = self.together or self.alone or len(self.shapes) == 1
        return self if whole else replace(self, shapes=self.shapes[:1])

    @property
    def rows(self) -> int:
        """Their number."""
        return len(self.shapes)

    @property
    def tokens(self) -> int:
        """Image tokens of all rows."""
        return sum(shape.image for shape in self.shapes)

    @property
    def steps(self) -> int:
        """Row steps: the sum over rows of the steps still to compute."""
        return sum(shape.steps for shape in self.shapes)

    def fits(self, rows: int, capacity_rows: int) -> bool:
        """Whether a worker that has so many rows can take it now.

        One that has none always can, since the largest job must run too.
        """
        return rows == 0 or (not self.alone and rows + self.rows <= capacity_rows)

    def loads(self, pace: Pace, *, reuses: bool) -> tuple[RowLoad, ...]:
        """Of its rows on a worker of this pace."""
        return tuple(shape.load(pace, reuses=reuses and self.template is not None) for shape in self.shapes)
