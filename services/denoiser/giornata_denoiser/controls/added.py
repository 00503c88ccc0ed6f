"""What the ControlNets of a row add in one step, as the blocks of its sequences read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from giornata.control.expansion import Behind
from giornata_denoiser.engine.controls import OfSequences


@dataclass(frozen=True, eq=False)
class RowResiduals:
    """Sums that are here."""

    behind: Behind
    """By block, which of them is added behind it."""
    sums: tuple[Tensor, ...]
    """(sequences, tokens, channels) each; one sequence serves all."""

    def of(self, sequences: int) -> OfSequences:
        """By sequence of the row."""
        return tuple(_LocalResiduals(self, nth) for nth in range(sequences))


@dataclass(frozen=True, eq=False)
class _LocalResiduals:
    """Satisfies :class:`giornata.packed.uses.Residuals`."""

    added: RowResiduals
    nth: int

    whole = True
    """Samples are of the whole picture."""

    def sample(self, block: int) -> Tensor | None:
        """(tokens, channels) behind `block`."""
        index = self.added.behind[block]
        if index is None:
            return None
        of = self.added.sums[index]
        return of[self.nth if len(of) > 1 else 0]
