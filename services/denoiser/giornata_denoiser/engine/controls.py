"""The ControlNets of a step's rows: what they add to the blocks, from whoever computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from giornata.packed.uses import Residuals, Use
from giornata.scheduling.batch import RowKey
from giornata_denoiser.rows.row import Row


class ControlNotLoaded(LookupError):
    """A row is to be computed, and a ControlNet that acts in its step is not here."""


class Controls(Protocol):
    """Computes ControlNets."""

    def residuals(self, rows: Sequence[Row]) -> tuple[Residuals | None, ...]:
        """What the ControlNets of `rows` add in their next steps, by row; None where none acts.

        Raises:
            ControlNotLoaded: one acts and cannot be computed: a row is never computed without it.
        """

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""


class NoControls:
    """A worker that has none; satisfies :class:`Controls`."""

    def residuals(self, rows: Sequence[Row]) -> tuple[Residuals | None, ...]:
        """None for each row."""
        for row in rows:
            if any(row.adapters.controlling(row.step)):
                raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")
        return (None,) * len(rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """Nothing is kept."""


def controlled(
    uses: Sequence[Use], rows: Sequence[Row], residuals: Sequence[Residuals | None]
) -> tuple[Use, ...]:
    """The `uses` of a batch's sequences with the residuals of their rows, which are by row.

    A row's negative sequence gets the same, as in `FluxControlNetPipeline`.
    """
    guided = (each for row, each in zip(rows, residuals, strict=True) if len(row.prompts) > 1)
    return tuple(
        use if added is None else replace(use, residuals=added)
        for use, added in zip(uses, (*residuals, *guided), strict=True)
    )
