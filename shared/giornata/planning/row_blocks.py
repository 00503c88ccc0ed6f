"""The blocks of rows as a planner of loads is told of them: what each mode takes, and what is loaded for it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from giornata.planning.cost_model import StepCosts
from giornata.planning.operations import NetworkOperations, SequenceShape
from giornata.wire.values import BlockMode

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
MODES: Final = tuple(BlockMode)
CODES: Final = {mode: code for code, mode in enumerate(MODES)}
FULL, HIDDEN, KV = (CODES[mode] for mode in (BlockMode.FULL, BlockMode.HIDDEN, BlockMode.KV))
Modes = tuple[BlockMode, ...]
"""A mode for every block."""
SLABS: Final = 8
"""In how many slabs the planner counts the largest load of a block: enough to tell loads apart, few enough to plan."""


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """One row's blocks, over one step or several: what each mode takes, and what has to be loaded for it first.

    Each column is (blocks,).
    """

    full_ms: Numbers
    hidden_ms: Numbers
    kv_ms: Numbers
    hidden_slabs: Numbers
    """Slabs of the outside tokens' input, whole numbers; 0 where it is on the device already."""
    kv_slabs: Numbers
    """Slabs of their keys and values; 0 where these are on the device already."""
    fresh: Flags
    """A step's first blocks, where the outside tokens' hidden state is always at hand."""
    hidden_kept: Flags
    kv_kept: Flags
    """Whether the template keeps a hidden state, and keys and values."""

    def __len__(self) -> int:
        return len(self.full_ms)


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch at the planner; all rows have the same number of blocks."""

    blocks: RowBlocks
    template: Hashable
    """Rows of one template load each entry once together."""


@dataclass(frozen=True)
class LoadLink:
    """The path on which the loader moves slabs, one after the other, in the order of the blocks."""

    slab_ms: float
    busy_ms: float = 0.0
    """Time until it is free for this plan's first slab."""


class StepCacheReads(NamedTuple):
    """The entries that the blocks of one step take from the cache."""

    forms: Modes
    """`KV`, `HIDDEN`, which a block in full may need too, or `FULL` for nothing."""
    kv: Counts
    """(blocks,): 1 where a block takes keys and values, else 0."""
    hidden: Counts
    """As `kv`: where it takes a hidden state."""


@lru_cache(maxsize=1024)
def takes(modes: Modes) -> StepCacheReads:
    """Return what a step in these `modes` takes; no hidden state in its first block and behind a block in full."""
    forms, live = [], True
    for mode in modes:
        forms.append(BlockMode.KV if mode is BlockMode.KV else BlockMode.FULL if live else BlockMode.HIDDEN)
        live = mode is BlockMode.FULL
    kv, hidden = (
        np.array([form is one for form in forms], np.int64) for one in (BlockMode.KV, BlockMode.HIDDEN)
    )
    return StepCacheReads(tuple(forms), kv, hidden)


@dataclass(frozen=True, eq=False)
class BlockLoads:
    """Bytes that a row loads for each block, (blocks,) int64; 0 for an entry that is on the device."""

    hidden_bytes: Counts
    kv_bytes: Counts
    hidden_kept: Flags
    """(blocks,), as `kv_kept`: whether there is such an entry."""
    kv_kept: Flags

    @classmethod
    def equal(
        cls, blocks: int, hidden_bytes: int = 0, kv_bytes: int = 0, *, hidden_kept: bool = True
    ) -> BlockLoads:
        """Return those of so many equal blocks, which keep keys and values."""
        hidden, kv = (np.full(blocks, size, np.int64) for size in (hidden_bytes, kv_bytes))
        return cls(hidden, kv, np.full(blocks, hidden_kept), np.ones(blocks, bool))

    def then(self, later: BlockLoads) -> BlockLoads:
        """Return those of this step and of the next one."""
        return BlockLoads(
            np.concatenate((self.hidden_bytes, later.hidden_bytes)),
            np.concatenate((self.kv_bytes, later.kv_bytes)),
            np.concatenate((self.hidden_kept, later.hidden_kept)),
            np.concatenate((self.kv_kept, later.kv_kept)),
        )

    @property
    def largest_bytes(self) -> int:
        """The largest of all."""
        return int(max(self.hidden_bytes.max(initial=0), self.kv_bytes.max(initial=0)))


def slab_unit(loads: Iterable[BlockLoads]) -> float:
    """Bytes of a slab in a plan over these loads."""
    return max((load.largest_bytes for load in loads), default=0) / SLABS


def row_blocks(
    costs: StepCosts,
    operations: NetworkOperations,
    shapes: Sequence[SequenceShape],
    loads: BlockLoads,
    unit_bytes: float,
) -> RowBlocks:
    """A row's blocks for the planner; `loads` are those of one step or of several.

    Loads are rounded up to whole slabs, of `unit_bytes` each.
    """
    count, blocks = len(loads.kv_bytes), operations.blocks
    times = np.tile(_of_blocks(costs, operations, tuple(shapes)), count // blocks)
    hidden, kv = np.ceil(np.array((loads.hidden_bytes, loads.kv_bytes)) / (unit_bytes or 1.0))
    fresh = np.arange(count) % blocks == 0
    return RowBlocks(
        times[FULL], times[HIDDEN], times[KV], hidden, kv, fresh, loads.hidden_kept, loads.kv_kept
    )


@lru_cache(maxsize=1024)
def _of_blocks(costs: StepCosts, operations: NetworkOperations, shapes: tuple[SequenceShape, ...]) -> Numbers:
    """(modes, blocks) milliseconds that a row adds to each block in each of :data:`MODES`."""
    amounts = np.array([[shape.amounts(mode) for mode in MODES] for shape in shapes]).sum(0)
    added: Numbers = amounts @ costs.rates(operations).T
    return added
