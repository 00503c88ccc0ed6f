"""Rows' inputs on the device, and the assembly of those that share a step: both are kept while they serve."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from giornata.packed.low_rank import SequenceLoras
from giornata.scheduling.batch import RowKey
from giornata_denoiser.engine.assembly import BatchTensors, DeviceInputs, assemble, place
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row


class _CachedBatchTensors(NamedTuple):
    rows: tuple[Row, ...]
    low_ranks: tuple[SequenceLoras | None, ...]
    assembly: BatchTensors


class BatchAssembler:
    """Places the rows of one engine and assembles them."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self._placed: dict[RowKey, DeviceInputs] = {}
        self._assembled: dict[bool, _CachedBatchTensors] = {}
        """The last assembly of rows that the network computes, and the last of others."""

    def of(self, rows: tuple[Row, ...], low_ranks: tuple[SequenceLoras | None, ...]) -> BatchTensors:
        """The assembly of `rows`: that of the last step while no row joined or left, and no LoRA joined."""
        return self._of(rows, low_ranks, computes=True)

    def beside(self, rows: tuple[Row, ...], low_ranks: tuple[SequenceLoras | None, ...]) -> BatchTensors:
        """The same of rows of which the network computes nothing."""
        return self._of(rows, low_ranks, computes=False)

    def _of(
        self, rows: tuple[Row, ...], low_ranks: tuple[SequenceLoras | None, ...], *, computes: bool
    ) -> BatchTensors:
        found = self._assembled.get(computes)
        if found and _same_inputs(found.rows, rows) and found.low_ranks == low_ranks:
            return found.assembly
        del found
        self._assembled.pop(computes, None)  # freed before the next is made
        placed = [self._placed_row(row, of) for row, of in zip(rows, low_ranks, strict=True)]
        assembly = assemble(self._family, rows, placed, computes=computes)
        self._assembled[computes] = _CachedBatchTensors(rows, low_ranks, assembly)
        return assembly

    def retain(self, keys: Collection[RowKey], *, resting: bool) -> None:
        """Forget all rows but these, and the assembly where the engine is `resting`."""
        for key in self._placed.keys() - keys:
            del self._placed[key]
        if resting:
            self._assembled.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.retain((), resting=True)

    def _placed_row(self, row: Row, low_rank: SequenceLoras | None) -> DeviceInputs:
        """The inputs of `row` on the device under `low_rank`, copied unless they are there."""
        placed = self._placed.get(row.key)
        if placed is None or placed.source is not row.conditioning or placed.low_rank is not low_rank:
            made = place(row, self._family, low_rank)
            placed = self._placed[row.key] = replace(made, low_rank=low_rank)
        return placed


def _same_inputs(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Whether the rows differ in latents and steps only: every row is built with conditioning of its own."""
    return len(before) == len(after) and all(
        a.conditioning is b.conditioning for a, b in zip(before, after, strict=True)
    )
