"""The ControlNets of a step's rows: what they add to the blocks, from whoever computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from giornata.packed.uses import BlockInputs, Residuals
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.rows.row import Row

OfSequences = tuple[Residuals, ...]
"""What is added to each sequence of a row; empty where no ControlNet acts."""


class ControlNotLoaded(LookupError):
    """A row is to be computed, and a ControlNet that acts in its step is not here."""


class ControlLost(ConnectionError):
    """What is to be added to rows does not come: the step is to be repeated when they are open elsewhere."""

    def __init__(self, keys: Collection[RowKey]) -> None:
        super().__init__(f"the ControlNets of {len(keys)} rows are lost")
        self.keys = frozenset(keys)


class ControlExecutor(Protocol):
    """Computes ControlNets, or has them computed."""

    def able(self, row: Row) -> Row | None:
        """`row`, with what its ControlNets cost this process now; None while what acts in its next step has to wait."""

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        """What the ControlNets of `rows` add in their next steps, by row.

        `whole` tells of each row whether the step computes all of its tokens in some block. Whoever reads a sample may
        wait for it, which `waits` adds up.

        Raises:
            ControlNotLoaded: one acts and cannot be computed: a row is never computed without it.
            ControlLost: it cannot be computed where it was to be.
        """

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""


class NoControls:
    """A worker that has none; satisfies :class:`ControlExecutor`."""

    def able(self, row: Row) -> Row | None:
        """Always: a row that has ControlNets fails at once."""
        return row

    def residuals(
        self,
        rows: Sequence[Row],
        whole: Sequence[bool],  # noqa: ARG002 - protocol
        waits: WaitTimer,  # noqa: ARG002 - protocol
    ) -> tuple[OfSequences, ...]:
        """Nothing for each row."""
        for row in rows:
            if any(row.adapters.controlling(row.step)):
                raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")
        return ((),) * len(rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """Nothing is kept."""


def wholly(uses: Sequence[BlockInputs], rows: Sequence[Row]) -> list[bool]:
    """By row, whether its step computes all of its tokens in some block."""
    taken = (use.taken for use in uses[: len(rows)])
    return [each is None or BlockMode.FULL in each.modes for each in taken]


def controlled(
    uses: Sequence[BlockInputs], rows: Sequence[Row], residuals: Sequence[OfSequences]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with the residuals of their rows, which are by row."""
    if not any(residuals):
        return tuple(uses)
    positive = [of[0] if of else None for of in residuals]
    guided = [of[1] if of else None for row, of in zip(rows, residuals, strict=True) if len(row.prompts) > 1]
    return tuple(
        use if added is None else replace(use, residuals=added)
        for use, added in zip(uses, (*positive, *guided), strict=True)
    )
