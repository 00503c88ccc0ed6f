"""The LoRAs of a step's rows: one set of factors for each row, from the store that holds them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.uses import BlockInputs
from giornata_denoiser.rows.adapters import RowLora
from giornata_denoiser.rows.row import Row


class LowRanks(Protocol):
    """Holds sets of LoRAs on the engine's device, in the network's dtype."""

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """The set of these LoRAs, sorted; the same object while it stays loaded. None while it is not."""


class NoLoras:
    """A worker that holds none; satisfies :class:`LowRanks`."""

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:  # noqa: ARG002 - protocol
        """None."""
        return None


class LoraNotLoaded(LookupError):
    """A row is to be computed, and a LoRA that acts in its step is not loaded."""


def acting(row: Row, low_ranks: LowRanks) -> SequenceLoras | None:
    """The set that acts in the row's next step; None where none is to.

    Raises:
        LoraNotLoaded: one is to, and is not there: the row is never computed without it.
    """
    loras = row.adapters.acting(row.step)
    if not loras:
        return None
    found = low_ranks.find(loras)
    if found is None:
        raise LoraNotLoaded(
            f"row {row.key} has LoRAs {[lora.digest for lora in loras]}, which are not loaded"
        )
    return found


def by_set(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows in an order in which equal sets are neighbours, the others' order kept."""
    return tuple(sorted(rows, key=lambda row: row.adapters.loras))


def adapted(
    uses: Sequence[BlockInputs], rows: Sequence[Row], low_ranks: Sequence[SequenceLoras | None]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with the sets of their rows, which are by row."""
    guided = (low_rank for row, low_rank in zip(rows, low_ranks, strict=True) if len(row.prompts) > 1)
    return tuple(
        use if low_rank is None else replace(use, low_rank=low_rank)
        for use, low_rank in zip(uses, (*low_ranks, *guided), strict=True)
    )
