"""What a job asks of a worker, and what that costs there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import Final

from giornata.planning.controls import control_work
from giornata.planning.costs import StepCosts, renewed_every
from giornata.planning.degrees import StepParallelism, Ways
from giornata.planning.operations import NetworkOperations, SequenceShape
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.scheduling.backlog import RowLoad
from giornata.wire.adapters import ControlWork
from giornata.wire.blocks import BlockSpec
from giornata.wire.values import BlockMode

TOKENS: Final = NetworkOperations([BlockSpec(linear=1.0, text=1.0)])
"""Operations of a network that nothing is known of: one operation a computed token."""
ROUNDING: Final = 1e-9
"""Makes the share k / n of n steps k again."""
UNIT: Final = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""A millisecond an operation: workers that have told nothing are compared by the tokens that they compute."""


@dataclass(frozen=True)
class StepTimeModel:
    """What steps cost on one worker."""

    costs: StepCosts = UNIT
    operations: NetworkOperations = TOKENS
    """What the blocks of the network compute."""
    reused: BlockMode = BlockMode.KV
    """How rows take from templates there."""
    renewed_every: int = 0
    """Rows without a template compute one step in so many in full there, and of others their compute set; 0: all."""
    keeps_padding: bool = False
    """Whether most steps of rows that reuse take their prompts' padding there, instead of computing it."""
    slowness: float = 1.0
    """How many times slower this worker is than `costs`, which all workers of its kind share."""
    loading: float = 1.0
    """How many times longer than their least computing rows that reuse take, as the worker's planner expects."""
    controls: tuple[tuple[str, ControlWork], ...] = ()
    """Digests and work of the ControlNets that its process computes; others cost it nothing."""
    ways: Ways = ()
    """What steps cost that several of its devices compute together; empty of a worker with one device."""

    @cached_property
    def spread(self) -> Mapping[StepParallelism, StepTimeModel]:
        """The same worker's pace in steps of each of these ways."""
        return {way: replace(self, costs=costs, ways=()) for way, costs in self.ways}

    @property
    def base_ms(self) -> float:
        """Time of a forward without any row, and so of a step."""
        return self.slowness * self.costs.call_ms

    @property
    def whole_ms(self) -> float:
        """Time that a step in full of a row that reuses takes beyond the row's own: 0, or that of another forward.

        Where blocks are taken together, rows in full are not computed with rows that take.
        """
        return self.base_ms if self.operations.together else 0.0

    @cached_property
    def _rates(self) -> tuple[float, ...]:
        """Milliseconds of each of :meth:`SequenceShape.amounts` in all blocks."""
        rates: list[float] = (self.slowness * self.costs.rates(self.operations).sum(0)).tolist()
        return tuple(rates)

    def row_ms(self, shape: RowShape, mode: BlockMode) -> float:
        """Time that a row adds to a step."""
        added: float = sum(map(mul, self._rates, shape.amounts(mode)))
        return shape.sequences * added

    def controlled(self, shape: RowShape, controls: Iterable[NeededControl]) -> RowShape:
        """`shape` with what these ControlNets compute here, spread over its steps."""
        work = dict(self.controls)
        picture = shape.image - shape.companions
        added = sum(
            net.share
            * control_work(work[net.digest], text=shape.text, image=picture, sequences=shape.sequences)
            for net in controls
            if net.digest in work
        )
        return replace(shape, control=added) if added else shape


@dataclass(frozen=True, slots=True)
class RowShape(SequenceShape):
    """One row, as far as its cost depends on it; its compute set counts where the template is at hand.

    Its padding counts where the worker keeps it, in steps that compute the compute set.
    """

    steps: int
    """Still to compute."""
    sequences: int = 1
    """2 with true classifier-free guidance."""
    begun: bool = False
    """Whether its next step is like the others: it has made one where it is, or knows what that would teach."""
    companions: int = 0
    """Image tokens beside the picture's; `image` counts them too."""
    skipped: int = 0
    """Steps that are extrapolated, as far as that is known before; what they save is spread over all."""

    def load(self, pace: StepTimeModel, *, reuses: bool, renewed_every: int = 0) -> RowLoad:
        """What the row adds to steps of a worker of this pace.

        It takes from a template, or what one step in full in so many makes (0: none does), or computes everything.
        """
        load = self._of_computed(pace, reuses=reuses, renewed_every=renewed_every)
        if not self.skipped:
            return load
        return load._replace(step_ms=load.step_ms * (1 - self.skipped / self.steps))

    def _of_computed(self, pace: StepTimeModel, *, reuses: bool, renewed_every: int) -> RowLoad:
        """:meth:`load` of a row that computes all of its steps."""
        unpadded = self if pace.keeps_padding else self.whole
        full_ms = pace.row_ms(self.whole, BlockMode.FULL)
        tokens = self.sequences * (self.text + self.image)
        prefix = 0 if self.begun else self.sequences * self.prefix
        joining_ms = pace.row_ms(self.joining, BlockMode.FULL) if prefix else 0.0
        whole = RowLoad(self.steps, full_ms, joining_ms, tokens, prefix)
        if not (reuses or renewed_every) or self.computed >= self.image:
            return whole
        mode, loading = (pace.reused, pace.loading) if reuses else (BlockMode.KV, 1.0)
        masked_ms = loading * pace.row_ms(unpadded, mode)
        if masked_ms >= full_ms:  # above the crossover the worker does not reuse
            return whole
        masked = self.sequences * (unpadded.live_text + self.computed)
        if not reuses:  # steps in full are spread over the others
            share = self._renewals(renewed_every)
            masked_ms += share * (full_ms + pace.whole_ms - masked_ms)
            masked += round(share * (tokens - masked))
        if self.begun:
            return RowLoad(self.steps, masked_ms, tokens=masked)
        first_ms = joining_ms + full_ms + pace.whole_ms - masked_ms
        return RowLoad(self.steps, masked_ms, first_ms, masked, prefix + tokens - masked)

    @property
    def joining(self) -> RowShape:
        """Its prefix, as a picture of its own without text: computed where it makes its first step."""
        return replace(self, text=0, padding=0, prefix=0, image=self.prefix, computed=self.prefix)

    @property
    def whole(self) -> RowShape:
        """The same row in a step in full, which computes padding too."""
        return replace(self, padding=0) if self.padding else self

    def _renewals(self, every: int) -> float:
        """Share of steps in full among the steps to come, the first one of a row that has not begun aside."""
        if self.begun:
            return 1 / every
        return (math.ceil(self.steps / every) - 1) / max(1, self.steps - 1)


@dataclass(frozen=True, slots=True)
class JobDemand:
    """What a job asks of a worker."""

    model: str
    model_digest: str
    shapes: tuple[RowShape, ...]
    template: str | None = None
    """Picture whose recording they may take from; None where they do not reuse."""
    ticket: int = 0
    """Counts jobs in order of arrival."""
    renews: bool = False
    """Where no template is at hand, its rows may take what their own steps in full make."""
    within_ms: float | None = None
    """Time from now in which the client wants the rows computed."""
    together: bool = False
    """Its rows go to one worker; otherwise they may be computed by several."""
    alone: bool = False
    """It goes to an empty worker: it is suspected of having brought others down."""
    adapters: tuple[NeededLora, ...] = ()
    joins_within: float = 0.0
    """Share of their steps that its rows may make before their adapters are there; 0: they wait for them, `exact`."""
    controls: tuple[NeededControl, ...] = ()

    def piece(self) -> JobDemand:
        """What is placed at once: the first row, or all rows where they stay together."""
        whole = self.together or self.alone or len(self.shapes) == 1
        return self if whole else replace(self, shapes=self.shapes[:1])

    @property
    def rows(self) -> int:
        """Rows that are still to be computed."""
        return len(self.shapes)

    @property
    def tokens(self) -> int:
        """Tokens of the pictures of all rows."""
        return sum(shape.image - shape.companions for shape in self.shapes)

    @property
    def computed(self) -> int:
        """Image tokens that all rows compute where their template is at hand."""
        return sum(shape.computed for shape in self.shapes)

    @property
    def steps(self) -> int:
        """Row steps: the sum over rows of the steps still to compute."""
        return sum(shape.steps for shape in self.shapes)

    @property
    def needing(self) -> float:
        """Share of their steps for which its rows need their adapters; they join after whole steps."""
        most = max(shape.steps for shape in self.shapes)
        return 1 - int(self.joins_within * most + ROUNDING) / most

    @property
    def size(self) -> float:
        """Token steps, to compare what jobs ask for."""
        return float(sum((row.text + row.computed) * row.sequences * row.steps for row in self.shapes))

    def fits(self, rows: int, capacity_rows: int) -> bool:
        """Whether a worker with so many rows can take it now; one without any can, since the largest job must run."""
        return rows == 0 or (not self.alone and rows + self.rows <= capacity_rows)

    def loads(self, pace: StepTimeModel, *, reuses: bool) -> tuple[RowLoad, ...]:
        """What its rows add to steps of a worker of this pace."""
        hit = reuses and self.template is not None
        most = pace.renewed_every if self.renews and not hit else 0
        return tuple(
            pace.controlled(shape, self.controls).load(
                pace, reuses=hit, renewed_every=renewed_every(shape.steps, most)
            )
            for shape in self.shapes
        )
