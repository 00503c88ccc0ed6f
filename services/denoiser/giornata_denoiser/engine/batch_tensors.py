"""The packed tensors of a batch: what stays the same while its rows do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import Segments, to_device
from giornata.scheduling.batch import RowKey
from giornata_denoiser.families.protocol import ModelFamily, SequenceInputs
from giornata_denoiser.rows.row import Row

# Putting a batch together: the packed tensors that stay the same while its rows do.


@dataclass(frozen=True, eq=False)
class DeviceInputs:
    """A row's inputs on the engine's device: copied when it joins, kept while it runs."""

    sequences: tuple[SequenceInputs, ...]
    conditioning: Mapping[str, Tensor]
    """(tokens, channels) each."""
    source: Mapping[str, Tensor]
    """The row's own conditioning; `conditioning` is a copy of it. Every row is built with its own."""
    matrices: Tensor
    """(steps, states, 2 + states): those of the row's track."""
    low_rank: SequenceLoras | None = None
    """The LoRAs under which the sequences are prepared."""


def place_inputs(row: Row, family: ModelFamily, low_rank: SequenceLoras | None = None) -> DeviceInputs:
    """The inputs of `row` on the family's device; its own tensors where they are there already.

    They are for steps in which `low_rank` acts.
    """
    device = family.device
    region = None if row.region is None else row.region.on(device)
    prompts, times = [prompt.to(device) for prompt in row.prompts], to_device(row.track.times, device)
    conditioning = {name: to_device(tensor, device) for name, tensor in row.conditioning.items()}
    prepared = (
        family.network.prepare(prompt, times, conditioning, row.beside, low_rank=low_rank)
        for prompt in prompts
    )
    return DeviceInputs(
        tuple(
            SequenceInputs(
                prompt, row.grid, region, row.companions, made, row.beside, half if len(prompts) > 1 else None
            )
            for half, (prompt, made) in enumerate(zip(prompts, prepared, strict=True))
        ),
        conditioning,
        row.conditioning,
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
    guided_rows = [index for index, row in enumerate(rows) if len(row.prompts) > 1]
    lengths = tuple(row.computed_tokens for row in rows)
    row_of_computed = Segments(lengths).sequence
    regions = tuple(
        None if region is None else region.computed
        for region in (each.sequences[0].region for each in placed)
    )
    return BatchTensors(
        batch=family.network.assemble(
            [each.sequences[0] for each in placed] + [placed[index].sequences[1] for index in guided_rows]
        )
        if computes
        else None,
        conditioning=tuple(placed[index].conditioning for index in (*range(len(rows)), *guided_rows)),
        computed=_computed(rows, regions, device),
        regions=regions,
        row_of_computed=to_device(row_of_computed, device),
        computed_lengths=list(lengths),
        guided=_guided(rows, guided_rows, row_of_computed, device) if guided_rows else None,
        matrices=tuple(each.matrices for each in placed),
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
    scales = torch.tensor([row.true_cfg_scale for row in rows], dtype=torch.float32)
    return GuidedRows(
        rows=tuple(indices),
        tokens=to_device(torch.isin(row_of_token, chosen).nonzero().squeeze(1), device),
        computed=to_device(computed, device),
        scale=to_device(scales[row_of_computed[computed]].unsqueeze(1), device),
    )


# Rows' inputs on the device, and the assembly of those that share a step: both are kept while they serve.


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
            made = place_inputs(row, self._family, low_rank)
            placed = self._placed[row.key] = replace(made, low_rank=low_rank)
        return placed


def _same_inputs(before: Sequence[Row], after: Sequence[Row]) -> bool:
    """Return whether the rows differ in latents and steps only: every row is built with conditioning of its own."""
    return len(before) == len(after) and not [
        True for a, b in zip(before, after, strict=True) if a.conditioning is not b.conditioning
    ]
