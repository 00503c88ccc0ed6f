"""The padding of a row's prompts at the planner: some steps compute it, and those after them take what they made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from giornata.packed.kept import CachedKVRecorder
from giornata.packed.uses import BlockInputs
from giornata_denoiser.blocks.own import OwnKeysValues
from giornata_denoiser.rows.row import Row


class PromptPaddingCache:
    """What is kept of the padding of a row's prompts, and whether the present step takes it.

    `kept` has one of each sequence; None for a prompt without padding.
    """

    def __init__(self, kept: Sequence[OwnKeysValues | None]) -> None:
        self._kept = tuple(kept)
        self._kept_at: int | None = None
        """The step that last computed it."""
        self.taken = False

    def advance(self, row: Row, *, whole: bool) -> None:
        """Choose for the next step of `row`: computed with the `whole` picture, or where nothing is kept.

        A step that failed and is tried again computes it again: it may have kept a part.
        """
        self.taken = self._kept_at is not None and self._kept_at < row.step and not whole
        if not self.taken:
            self._kept_at = row.step

    def added(self, uses: Sequence[BlockInputs]) -> tuple[BlockInputs, ...]:
        """The row's `uses`, one of each sequence, with that of its padding."""
        return tuple(
            use if kept is None else self._added(use, kept)
            for use, kept in zip(uses, self._kept, strict=True)
        )

    def _added(self, use: BlockInputs, kept: OwnKeysValues) -> BlockInputs:
        if self.taken:
            return replace(use, padding=kept)
        return replace(use, padding_recorder=CachedKVRecorder(kept))
