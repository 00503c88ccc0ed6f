"""The inputs of a batch: packed tensors that stay while its rows do, and what LoRAs and ControlNets add to a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import BlockInputs, Residuals, Segments, by_sequence, to_device
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.families.network import ModelFamily, SequenceInputs
from giornata_denoiser.rows.parts import RowLora
from giornata_denoiser.rows.row import Row, RowInputs


def with_field(
    uses: Sequence[BlockInputs], name: str, of_rows: Sequence[Sequence[Any]]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with another value of a field, by row and sequence; None changes nothing."""
    return tuple(
        use if value is None else replace(use, **{name: value})
        for use, value in zip(uses, by_sequence(of_rows), strict=True)
    )


class LoraNotLoaded(LookupError):
    """A row is to be computed, and a LoRA that acts in its step is not loaded."""


class LowRanks(Protocol):
    """Holds sets of LoRAs on the engine's device, in the network's dtype."""

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """The set of these LoRAs, sorted; the same object while it stays loaded. None while it is not."""


class LoraPart:
    """The LoRAs of rows, as `held` has them; a worker without one has none."""

    def __init__(self, held: LowRanks | None = None) -> None:
        self._held = held

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """See :meth:`LowRanks.find`."""
        return None if self._held is None else self._held.find(loras)

    def able(self, row: Row) -> Row | None:
        """`row` as its next step is to be made; None while it has to wait for its LoRAs.

        LoRAs act from this step on where they were to act later, may join early and are loaded: "Katz: Efficient
        Workflow Serving for Diffusion Models with Many Adapters", ATC '25, section 6, with a bound. What the row has
        learned of its template without them is void then: the step is computed in full and corrects again.
        """
        adapters = row.adapters
        if not adapters.loras:
            return row
        late = row.step < adapters.loras_from
        if late and not adapters.joins_early:
            return row
        if self.find(adapters.loras) is None:
            return row if late else None
        if not late:
            return row
        return replace(row.corrected(None), adapters=replace(adapters, loras_from=row.step))

    def sets(self, rows: Sequence[Row]) -> tuple[SequenceLoras | None, ...]:
        """By row, the set that acts in its next step; None where none is to.

        Raises:
            LoraNotLoaded: one is to, and is not there: a row is never computed without it.
        """
        found: list[SequenceLoras | None] = []
        for row in rows:
            loras = row.adapters.loras and row.adapters.acting(row.step)
            found.append(self.find(loras) if loras else None)
            if loras and found[-1] is None:
                digests = [lora.digest for lora in loras]
                raise LoraNotLoaded(f"row {row.key} has LoRAs {digests}, which are not loaded")
        return tuple(found)


def with_low_ranks(
    uses: Sequence[BlockInputs], rows: Sequence[Row], low_ranks: Sequence[SequenceLoras | None]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with the sets of their rows, which are by row."""
    if low_ranks.count(None) == len(low_ranks):
        return tuple(uses)
    pairs = zip(rows, low_ranks, strict=True)
    return with_field(uses, "low_rank", [(each,) * len(row.inputs.prompts) for row, each in pairs])


def order_by_set(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows in an order in which equal sets are neighbours, the others' order kept."""
    if not [row for row in rows if row.adapters.loras]:
        return tuple(rows)
    return tuple(sorted(rows, key=lambda row: row.adapters.loras))


OfSequences = tuple[Residuals, ...]
"""What is added to each sequence of a row; empty where no ControlNet acts."""


class ControlNotLoaded(LookupError):
    """A row is to be computed, and a ControlNet that acts in its step is not here."""


class ControlLost(ConnectionError):
    """The residuals of some rows do not come: the step is to be repeated when they are open elsewhere."""

    def __init__(self, keys: Collection[RowKey]) -> None:
        super().__init__(f"the ControlNets of {len(keys)} rows are lost")
        self.keys = frozenset(keys)


class ControlPart:
    """The ControlNets of rows. A worker that has none has this: a row with some fails at once."""

    def able(self, row: Row) -> Row | None:
        """`row` as its next step is to be made; None while it has to wait for its ControlNets."""
        return row

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""

    def add(
        self, rows: Sequence[Row], uses: tuple[BlockInputs, ...], waits: WaitTimer
    ) -> tuple[BlockInputs, ...]:
        """The `uses` of a batch's sequences with what ControlNets add in the next steps of `rows`.

        Whoever reads what is added may wait for it, which `waits` adds up; errors are those of :meth:`residuals`.
        """
        for row in rows:
            if row.adapters.controls:
                added = self.residuals(rows, computes_every_token(uses, rows), waits)
                return with_residuals(uses, rows, added)
        return uses

    def residuals(
        self,
        rows: Sequence[Row],
        whole: Sequence[bool],  # noqa: ARG002 - of those that have some
        waits: WaitTimer,  # noqa: ARG002 - likewise
    ) -> tuple[OfSequences, ...]:
        """Return what the ControlNets of `rows` add in their next steps, by row.

        `whole` tells of each row whether the step computes all of its tokens in some block.

        Raises:
            ControlNotLoaded: one acts and cannot be computed: a row is never computed without it.
            ControlLost: it cannot be computed where it was to be.
        """
        check_computed(rows, {})
        return ((),) * len(rows)


def check_computed(rows: Sequence[Row], keys: Collection[RowKey]) -> None:
    """Raise ControlNotLoaded where a ControlNet acts on one of `rows` that has none of these `keys`."""
    for row in rows:
        if row.key not in keys and any(row.adapters.controlling(row.step)):
            raise ControlNotLoaded(f"row {row.key} has ControlNets, and this worker has none")


def computes_every_token(uses: Sequence[BlockInputs], rows: Sequence[Row]) -> list[bool]:
    """By row, whether its step computes all of its tokens in some block."""
    return [use.taken is None or BlockMode.FULL in use.taken.modes for use in uses[: len(rows)]]


def with_residuals(
    uses: Sequence[BlockInputs], rows: Sequence[Row], residuals: Sequence[OfSequences]
) -> tuple[BlockInputs, ...]:
    """The `uses` of a batch's sequences with the residuals of their rows, which are by row."""
    pairs = zip(rows, residuals, strict=True)
    return with_field(uses, "residuals", [of or (None,) * len(row.inputs.prompts) for row, of in pairs])


@dataclass(frozen=True, eq=False)
class DeviceInputs:
    """A row's inputs on the engine's device: copied when it joins, kept while it runs."""

    sequences: tuple[SequenceInputs, ...]
    conditioning: Mapping[str, Tensor]
    """(tokens, channels) each."""
    source: RowInputs
    """What they are copies of."""
    matrices: Tensor
    """(steps, states, 2 + states): those of the row's track."""
    low_rank: SequenceLoras | None = None
    """The LoRAs under which the sequences are prepared."""


def place_inputs(row: Row, family: ModelFamily, low_rank: SequenceLoras | None = None) -> DeviceInputs:
    """The inputs of `row` on the family's device; its own tensors where they are there already.

    They are for steps in which `low_rank` acts.
    """
    device, inputs = family.device, row.inputs
    region = None if row.region is None else row.region.on(device)
    prompts, times = [prompt.to(device) for prompt in inputs.prompts], to_device(row.track.times, device)
    conditioning = {name: to_device(tensor, device) for name, tensor in inputs.conditioning.items()}
    prepared = (
        family.network.prepare(prompt, times, conditioning, inputs.beside, low_rank=low_rank)
        for prompt in prompts
    )
    return DeviceInputs(
        tuple(
            SequenceInputs(
                prompt,
                row.grid,
                region,
                inputs.companions,
                made,
                inputs.beside,
                half if len(prompts) > 1 else None,
            )
            for half, (prompt, made) in enumerate(zip(prompts, prepared, strict=True))
        ),
        conditioning,
        inputs,
        to_device(row.track.matrices, device),
        low_rank,
    )


@dataclass(frozen=True, eq=False)
class GuidedRows:
    """The rows with true classifier-free guidance; their negative sequences follow all positive ones."""

    rows: tuple[int, ...]
    """Their indices in the batch."""
    tokens: Tensor
    """(guided_tokens,) int64: all of their image tokens, in the order packed by row."""
    computed: Tensor
    """(guided_computed,) int64: as `tokens`, in the order of computed tokens."""
    scale: Tensor
    """(guided_computed, 1) float32, `true_cfg_scale`."""


@dataclass(frozen=True, eq=False)
class BatchTensors:
    """Packed tensors of a batch. Image tokens are packed by row; those of negative sequences follow."""

    batch: object
    """What the network predicts over; None where it computes nothing."""
    conditioning: tuple[Mapping[str, Tensor], ...]
    """Conditioning by sequence; positive sequences come first."""
    computed: Tensor | None
    """(computed_tokens,) int64: the tokens of the rows' regions among all tokens; None where that is all of them."""
    regions: tuple[Tensor | None, ...]
    """Each row's (computed,) int64, the tokens of its region; None for all of its picture."""
    row_of_computed: Tensor
    """(computed_tokens,) int64: batch index of each one's row."""
    computed_lengths: list[int]
    """Computed tokens of each row."""
    guided: GuidedRows | None
    matrices: tuple[Tensor, ...]
    """Each row's (steps, states, 2 + states), those of its track."""
    low_ranks: tuple[SequenceLoras | None, ...]
    """Each row's LoRAs."""


def assemble(
    family: ModelFamily,
    rows: Sequence[Row],
    placed: Sequence[DeviceInputs] | None = None,
    *,
    computes: bool = True,
) -> BatchTensors:
    """Pack `rows`. What changes from step to step (latents, noise levels) is not in it.

    `placed` are their inputs, in the same order; by default they are placed now. Where the network `computes` nothing,
    the assembly has no batch.
    """
    device = family.device
    placed = [place_inputs(row, family) for row in rows] if placed is None else placed
    guided = [index for index, row in enumerate(rows) if len(row.inputs.prompts) > 1]
    lengths = [row.computed_tokens for row in rows]
    row_of_computed = Segments(tuple(lengths)).sequence
    parts = [each.sequences[0].region for each in placed]
    regions = tuple(None if part is None else part.computed for part in parts)
    sequences = [each.sequences[0] for each in placed] + [placed[index].sequences[1] for index in guided]
    return BatchTensors(
        batch=family.network.assemble(sequences) if computes else None,
        conditioning=tuple(placed[index].conditioning for index in (*range(len(rows)), *guided)),
        computed=_computed(rows, regions, device),
        regions=regions,
        row_of_computed=to_device(row_of_computed, device),
        computed_lengths=lengths,
        guided=_guided(rows, guided, row_of_computed, device) if guided else None,
        matrices=tuple(each.matrices for each in placed),
        low_ranks=tuple(each.low_rank for each in placed),
    )


def _computed(rows: Sequence[Row], regions: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    if all(region is None for region in regions):
        return None
    lengths = [row.image_tokens for row in rows]
    tokens = torch.split(torch.arange(sum(lengths), device=device), lengths)
    return torch.cat(
        [
            part if region is None else part.index_select(0, region)
            for part, region in zip(tokens, regions, strict=True)
        ]
    )


def _guided(
    rows: Sequence[Row], indices: list[int], row_of_computed: Tensor, device: torch.device
) -> GuidedRows:
    chosen = torch.tensor(indices)
    row_of_token = Segments(tuple(row.image_tokens for row in rows)).sequence
    computed = torch.isin(row_of_computed, chosen).nonzero().squeeze(1)
    scales = torch.tensor([row.inputs.true_cfg_scale for row in rows], dtype=torch.float32)
    return GuidedRows(
        rows=tuple(indices),
        tokens=to_device(torch.isin(row_of_token, chosen).nonzero().squeeze(1), device),
        computed=to_device(computed, device),
        scale=to_device(scales[row_of_computed[computed]].unsqueeze(1), device),
    )


class BatchAssembler:
    """Places the rows of one engine, under the LoRAs that act, and assembles them."""

    def __init__(self, family: ModelFamily, loras: LoraPart) -> None:
        self._family, self._loras = family, loras
        self._placed: dict[RowKey, DeviceInputs] = {}
        self._assembled: dict[bool, tuple[tuple[Row, ...], BatchTensors]] = {}
        """The last assembly of rows that the network computes, and the last of others, with the rows."""

    def of(self, rows: tuple[Row, ...], *, computes: bool = True) -> BatchTensors:
        """The assembly of `rows`: that of the last step while no row joined or left, and no LoRA joined.

        Rows of which the network `computes` nothing have one of their own.

        Raises:
            LoraNotLoaded: one acts in a step of a row, and is not there.
        """
        low_ranks = self._loras.sets(rows)
        found = self._assembled.get(computes)
        if found and found[1].low_ranks == low_ranks:
            # Every row is built with inputs of its own: only latents and steps differ.
            pairs = zip(found[0], rows, strict=True)
            if not [row for known, row in pairs if known.inputs is not row.inputs]:
                return found[1]
        del found
        self._assembled.pop(computes, None)  # freed before the next is made
        placed = [self._placed_row(row, of) for row, of in zip(rows, low_ranks, strict=True)]
        assembly = assemble(self._family, rows, placed, computes=computes)
        self._assembled[computes] = rows, assembly
        return assembly

    @property
    def keys(self) -> frozenset[RowKey]:
        """Rows whose inputs are held, alone or in an assembly."""
        assembled = (rows for rows, _ in self._assembled.values())
        return frozenset(self._placed).union(row.key for rows in assembled for row in rows)

    def retain(self, keys: Collection[RowKey], *, resting: bool) -> None:
        """Forget all rows but these, and the assembly where the engine is `resting`."""
        for key in self._placed.keys() - keys:
            del self._placed[key]
        if resting:
            self._assembled.clear()

    def _placed_row(self, row: Row, low_rank: SequenceLoras | None) -> DeviceInputs:
        """The inputs of `row` on the device under `low_rank`, copied unless they are there."""
        placed = self._placed.get(row.key)
        if placed is None or placed.source is not row.inputs or placed.low_rank is not low_rank:
            placed = self._placed[row.key] = place_inputs(row, self._family, low_rank)
        return placed
