"""A row without a template at the planner: it takes its own keys and values, which every few steps are made anew."""

from __future__ import annotations

from collections.abc import Sequence

from giornata.packed.kept import CachedKVRecorder
from giornata.packed.uses import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.own import OwnKeysValues
from giornata_denoiser.rows.row import Row


class RefreshSchedule:
    """What its sequences keep, and whether the present step is computed in full to make that anew."""

    def __init__(self, kept: Sequence[OwnKeysValues]) -> None:
        self._kept = tuple(kept)
        self._renewed_at: int | None = None
        """The step that was last computed in full."""
        self.full = True
        """Whether the present step is computed in full."""

    def advance(self, row: Row) -> None:
        """Choose how the next step of `row` is computed: in full where that is due, or nothing is kept.

        A step in full that failed and is tried again is in full again: it may have renewed a part.
        """
        lost = self._renewed_at is None or self._renewed_at >= row.step
        self.full = lost or not row.masked
        if self.full:
            self._renewed_at = row.step

    def modes(self, blocks: int) -> tuple[BlockMode, ...]:
        """What so many blocks of the step compute."""
        return (BlockMode.FULL if self.full else BlockMode.KV,) * blocks

    def uses(self, blocks: int) -> tuple[BlockInputs, ...]:
        """One of each sequence."""
        if self.full:
            return tuple(BlockInputs(recorder=CachedKVRecorder(kept)) for kept in self._kept)
        return tuple(BlockInputs(CachedTokens(self.modes(blocks), kept)) for kept in self._kept)
