"""LoRAs and ControlNets of a step's rows, from whoever holds or computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from giornata.packed.compute_set import BlockInputs, Residuals
from giornata.packed.low_rank import SequenceLoras
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.slabs import WaitTimer
from giornata_denoiser.rows.row import Row, RowLora

# The ControlNets of a step's rows: what they add to the blocks, from whoever computes them.


OfSequences = tuple[Residuals, ...]
"""What is added to each sequence of a row; empty where no ControlNet acts."""


class ControlNotLoaded(LookupError):
    """A row is to be computed, and a ControlNet that acts in its step is not here."""


class ControlLost(ConnectionError):
    """The residuals of some rows do not come: the step is to be repeated when they are open elsewhere."""

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
        """Return what the ControlNets of `rows` add in their next steps, by row.

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
            if row.adapters.controls and any(row.adapters.controlling(row.step)):
                raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")
        return ((),) * len(rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        """Nothing is kept."""


def computes_every_token(uses: Sequence[BlockInputs], rows: Sequence[Row]) -> list[bool]:
    """By row, whether its step computes all of its tokens in some block."""
    return [use.taken is None or BlockMode.FULL in use.taken.modes for use in uses[: len(rows)]]


def with_residuals(
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


# The LoRAs of a step's rows: one set of factors for each row, from the store that holds them on the device.


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


def acting_set(row: Row, low_ranks: LowRanks) -> SequenceLoras | None:
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


def order_by_set(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows in an order in which equal sets are neighbours, the others' order kept."""
    if not [row for row in rows if row.adapters.loras]:
        return tuple(rows)
    return tuple(sorted(rows, key=lambda row: row.adapters.loras))


def with_low_ranks(
    uses: Sequence[BlockInputs], rows: Sequence[Row], low_ranks: Sequence[SequenceLoras | None]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with the sets of their rows, which are by row."""
    guided = (low_rank for row, low_rank in zip(rows, low_ranks, strict=True) if len(row.prompts) > 1)
    return tuple(
        use if low_rank is None else replace(use, low_rank=low_rank)
        for use, low_rank in zip(uses, (*low_ranks, *guided), strict=True)
    )


# LoRAs that arrive while their rows run: when a row may make a step, and when they begin to act. Pure.
#
# "Katz: Efficient Workflow Serving for Diffusion Models with Many Adapters", ATC '25, §6: a row begins
# without its LoRAs and takes them at the first step boundary after they are loaded. Here the step is
# bounded, and a row that does not want that waits.


def ready_row(row: Row, low_ranks: LowRanks) -> Row | None:
    """`row` as it makes its next step; None while it has to wait for its LoRAs.

    They act from this step on where they were to act later, may join early and are loaded. What the row has learned of
    its template without them is void then: the step is computed in full and corrects again.
    """
    adapters = row.adapters
    if not adapters.loras:
        return row
    late = row.step < adapters.loras_from
    if late and not adapters.joins_early:
        return row
    if low_ranks.find(adapters.loras) is None:
        return row if late else None
    if not late:
        return row
    return replace(row, adapters=replace(adapters, loras_from=row.step), corrections=None)
