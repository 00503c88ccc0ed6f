"""Residuals that ControlNets add in a step, and those that are cached for the steps after it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from giornata.control.expansion import Behind
from giornata.scheduling.batch import RowKey
from giornata_denoiser.engine.adapters import OfSequences
from giornata_denoiser.rows.row import Row

# What ControlNets have added in a step, for those after it. Pure.


A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class CachedResiduals(Generic[A]):
    """The residuals of one step."""

    step: int
    acting: tuple[bool, ...]
    """By ControlNet of the row, whether it acted."""
    whole: bool
    """Whether it is of all tokens."""
    added: A


class ResidualCache(Generic[A]):
    """A cache of the residuals of each row's latest step."""

    def __init__(self) -> None:
        self._held: dict[RowKey, CachedResiduals[A]] = {}

    def find(self, row: Row, acting: tuple[bool, ...], *, whole: bool, steps: int) -> A | None:
        """Return what one of the `steps` before the row's next one has made, where the same ControlNets act.

        None also where it is of the row's region, and the next step is `whole`.
        """
        held = self._held.get(row.key)
        if held is None or held.acting != acting or (whole and not held.whole):
            return None
        return held.added if 0 < row.step - held.step <= steps else None

    def keep(self, row: Row, acting: tuple[bool, ...], added: A, *, whole: bool) -> None:
        """Keep what the row's next step adds."""
        self._held[row.key] = CachedResiduals(row.step, acting, whole, added)

    def added(self, key: RowKey) -> A | None:
        """Return what is kept of a row."""
        held = self._held.get(key)
        return None if held is None else held.added

    def forget(self, key: RowKey) -> A | None:
        """Keep nothing of a row; returns what was kept."""
        held = self._held.pop(key, None)
        return None if held is None else held.added

    def retain(self, keys: Collection[RowKey]) -> list[A]:
        """Forget all rows but these; returns what was kept of the others."""
        return [self._held.pop(key).added for key in self._held.keys() - keys]


# What the ControlNets of a row add in one step, as the blocks of its sequences read it.


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
    """Satisfies :class:`giornata.packed.compute_set.Residuals`."""

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
