"""A step in which some rows, or all, are not computed: their outputs are extrapolated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from giornata.planning.operations import StepWork
from giornata_denoiser.engine.sources import StepPlan
from giornata_denoiser.engine.step_caching import extrapolated
from giornata_denoiser.engine.stepping import StepOutput
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import TaylorExpansion

T = TypeVar("T")


class ExtrapolationSplit(NamedTuple):
    """The rows of a step, by their places in it."""

    computed: tuple[int, ...]
    others: tuple[int, ...]
    known: tuple[TaylorExpansion, ...]
    """What the outputs of the others are extrapolated from, in their order."""

    def of(self, rows: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """What is computed, and the others."""
        computed, others = (tuple(rows[index] for index in of) for of in (self.computed, self.others))
        return computed, others

    def joined(self, computed: Sequence[T], others: Sequence[T]) -> tuple[T, ...]:
        """The inverse of :meth:`of`."""
        found = dict(zip((*self.computed, *self.others), (*computed, *others), strict=True))
        return tuple(found[index] for index in range(len(found)))


def divided(rows: Sequence[Row], *, learns: bool) -> ExtrapolationSplit:
    """Which of the rows are computed; for `learns` see :func:`extrapolated`."""
    known = [extrapolated(row, learns=learns) for row in rows]
    return ExtrapolationSplit(
        tuple(index for index, each in enumerate(known) if each is None),
        tuple(index for index, each in enumerate(known) if each is not None),
        tuple(each for each in known if each is not None),
    )


def joined(division: ExtrapolationSplit, computed: StepOutput | None, others: StepOutput) -> StepOutput:
    """What both parts of a step have come to; None where nothing is computed."""
    made = StepOutput((), (), (), (), (), ()) if computed is None else computed
    return StepOutput(
        division.joined(made.latents, others.latents),
        division.joined(made.clean, others.clean),
        division.joined(made.memory, others.memory),
        division.joined(made.generators, others.generators),
        division.joined(made.cached, others.cached),
        division.joined(made.skipped, others.skipped),
    )


def spread(division: ExtrapolationSplit, plan: StepPlan | None) -> StepPlan:
    """The plan of the rows that are computed, None where none is, with the others, which take and show nothing."""
    if plan is None:
        count = len(division.others)
        return StepPlan((), StepWork(calls=0), None, ((),) * count, (None,) * count)
    others = division.others
    return replace(
        plan,
        learning=division.joined(plan.learning, [()] * len(others)),
        recording=division.joined(plan.recording, [None] * len(others)),
    )
