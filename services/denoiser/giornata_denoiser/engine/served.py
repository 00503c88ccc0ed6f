"""What serves a row's step from one entry, and the modes in which its blocks run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from giornata.packed.uses import BlockInputs, CachedTokens
from giornata.planning.batch import BatchPlanner, BatchRow
from giornata.planning.blocks import Counts, LoadLink, takes
from giornata.planning.costs import SLABS, BlockLoads, StepCosts, row_blocks, slab_unit
from giornata.planning.operations import NetworkOperations, SequenceShape
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recording import CorrectionRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.loading import SlabRun
from giornata_denoiser.rows.template import Entry


@dataclass(frozen=True, eq=False)
class EntryReuse:
    """A row that takes from one entry: the slabs and shapes of its sequences, and its modes."""

    entry: Entry
    slabs: tuple[Slabs, ...]
    shapes: tuple[SequenceShape, ...]
    modes: tuple[BlockMode, ...]
    """The mode of every block; until they are planned, the cheapest of what the block kept."""
    final: bool = False
    """Nothing that is still to be loaded would change the modes."""
    learning: tuple[CorrectionRecorder, ...] = ()
    """One of each sequence, in a step that is computed in full to learn their corrections."""
    step: int = 0
    """The row's step when it was to learn."""

    @cached_property
    def block_bytes(self) -> Counts:
        """(blocks,) bytes of the slabs that each block's mode takes."""
        _, kv, hidden = takes(self.modes)
        sizes = [
            kv * slabs.sizes(BlockMode.KV) + hidden * slabs.sizes(BlockMode.HIDDEN)
            for slabs in self._distinct
        ]
        return sum(sizes[1:], sizes[0])

    @property
    def keeps(self) -> bool:
        """Whether its slabs keep what a step writes into them."""
        return all(slabs.keeps for slabs in self.slabs)

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to move for the modes."""
        _, kv, hidden = takes(self.modes)
        return sum(
            int(kv @ slabs.moving(BlockMode.KV)) + int(hidden @ slabs.moving(BlockMode.HIDDEN))
            for slabs in self._distinct
        )

    @property
    def computed(self) -> tuple[BlockMode, ...]:
        """What the step computes."""
        return (BlockMode.FULL,) * len(self.modes) if self.learning else self.modes

    def uses(self) -> tuple[BlockInputs, ...]:
        """One of each sequence."""
        if self.learning:
            return tuple(BlockInputs(recorder=recorder) for recorder in self.learning)
        return tuple(BlockInputs(CachedTokens(self.modes, slabs)) for slabs in self.slabs)

    def loads(self) -> BlockLoads:
        """What every block's modes would have to move."""
        kept = self.entry.channels
        hidden, kv = (
            np.sum([slabs.moving(mode) for slabs in self._distinct], axis=0)
            for mode in (BlockMode.HIDDEN, BlockMode.KV)
        )
        return BlockLoads(hidden, kv, kept[BlockMode.HIDDEN] > 0, kept[BlockMode.KV] > 0)

    def runs(self, blocks: int | None = None) -> Iterator[SlabRun]:
        """What the modes of the first `blocks`, or of all, take, whether it is here or not."""
        forms = takes(self.modes).forms
        return (SlabRun(slabs, forms, len(forms) if blocks is None else blocks) for slabs in self._distinct)

    @cached_property
    def _distinct(self) -> tuple[Slabs, ...]:
        """Each once, where sequences share them."""
        return tuple(dict.fromkeys(self.slabs))


def planned(
    now: Sequence[EntryReuse],
    following: Sequence[EntryReuse | None],
    costs: StepCosts,
    operations: NetworkOperations,
    planner: BatchPlanner,
    *,
    beside_ms: float,
    busy_ms: float,
    shared: bool,
) -> tuple[list[EntryReuse], float]:
    """The rows with the modes of this step, and its predicted end in ms, its fixed costs not counted.

    Plans across the step boundary: a load that this step could wait for may be the next step's delay. `following` is,
    for each row of `now`, what serves it in the next step, where that is another entry. A block takes `beside_ms`
    besides these rows, and the loader begins after `busy_ms`. Where loads are `shared`, rows of one entry load it once.
    """
    blocks = len(now[0].modes)
    # Loads of the next step, if the plan looks that far.
    loads = [row.loads() for row in now]
    windows = loads
    if any(following):
        none = BlockLoads.equal(blocks, hidden_kept=False)
        windows = [
            own.then(none if after is None else after.loads())
            for own, after in zip(loads, following, strict=True)
        ]
    unit = slab_unit(windows)
    link = LoadLink(costs.load[0] / SLABS + costs.load[1] * unit, busy_ms)
    loaded_once = [id(row.entry) if shared else id(row.slabs[0]) for row in now]
    works = [
        row_blocks(costs, operations, served.shapes, window, unit)
        for served, window in zip(now, windows, strict=True)
    ]
    plan = planner(list(map(BatchRow, works, loaded_once)), link, beside_ms)
    chosen = [
        _with_modes(row, modes[:blocks], own) for row, modes, own in zip(now, plan.modes, loads, strict=True)
    ]
    return chosen, plan.timeline.ended_ms[blocks - 1]


def _with_modes(served: EntryReuse, modes: tuple[BlockMode, ...], loads: BlockLoads) -> EntryReuse:
    """Final, if the modes are those of a row that has loaded everything."""
    return replace(served, modes=modes, final=modes == served.entry.modes or not loads.largest_bytes)
