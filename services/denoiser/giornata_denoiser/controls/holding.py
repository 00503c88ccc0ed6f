"""What ControlNets have added in a step, for those after it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from giornata.scheduling.batch import RowKey
from giornata_denoiser.rows.row import Row

A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class CachedResiduals(Generic[A]):
    """What one step has added."""

    step: int
    acting: tuple[bool, ...]
    """By ControlNet of the row, whether it acted."""
    whole: bool
    """Whether it is of all tokens."""
    added: A


class ResidualCache(Generic[A]):
    """What the latest step of each row has added."""

    def __init__(self) -> None:
        self._held: dict[RowKey, CachedResiduals[A]] = {}

    def find(self, row: Row, acting: tuple[bool, ...], *, whole: bool, steps: int) -> A | None:
        """What one of the `steps` before the row's next one has made, where the same ControlNets act.

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
        """What is kept of a row."""
        held = self._held.get(key)
        return None if held is None else held.added

    def forget(self, key: RowKey) -> A | None:
        """Keep nothing of a row; returns what was kept."""
        held = self._held.pop(key, None)
        return None if held is None else held.added

    def retain(self, keys: Collection[RowKey]) -> list[A]:
        """Forget all rows but these; returns what was kept of the others."""
        return [self._held.pop(key).added for key in self._held.keys() - keys]
