"""A row's blocks as columns, one number of every block each: what plans of many blocks compute with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from giornata.planning.blocks import BlockCost, Flags

Column = NDArray[np.float64]
"""(blocks,) milliseconds or slabs."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockCostColumns(Sequence[BlockCost]):
    """The blocks of one row, with nothing computed beside it; each column is (blocks,), as in :class:`BlockCost`."""

    full_ms: Column
    hidden_ms: Column
    kv_ms: Column
    hidden_slabs: Column
    """Whole numbers, as in `kv_slabs`."""
    kv_slabs: Column
    fresh: Flags
    hidden_kept: Flags
    kv_kept: Flags

    @classmethod
    def of(cls, blocks: Sequence[BlockCost]) -> BlockCostColumns:
        """The columns of `blocks`, without what they wait for beside their own."""
        if isinstance(blocks, BlockCostColumns):
            return blocks
        numbers = np.array(
            [(b.full_ms, b.hidden_ms, b.kv_ms, b.hidden_slabs, b.kv_slabs) for b in blocks], float
        )
        flags = np.array([(b.fresh, b.hidden_kept, b.kv_kept) for b in blocks], bool)
        return cls(*numbers.reshape(-1, 5).T.copy(), *flags.reshape(-1, 3).T.copy())

    def __len__(self) -> int:
        return len(self.full_ms)

    @overload
    def __getitem__(self, index: int) -> BlockCost: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockCost]: ...

    def __getitem__(self, index: int | slice) -> BlockCost | Sequence[BlockCost]:
        return self._blocks[index]

    @cached_property
    def _blocks(self) -> tuple[BlockCost, ...]:
        """The same as objects, made once: planners that go block by block ask for them."""
        columns = (self.full_ms, self.hidden_ms, self.kv_ms, self.hidden_slabs, self.kv_slabs)
        flags = zip(*(c.tolist() for c in (self.fresh, self.hidden_kept, self.kv_kept)), strict=True)
        return tuple(
            BlockCost(
                full, hidden, kv, int(hidden_slabs), int(kv_slabs), fresh, hidden_kept=kept, kv_kept=kv_kept
            )
            for (full, hidden, kv, hidden_slabs, kv_slabs), (fresh, kept, kv_kept) in zip(
                zip(*(column.tolist() for column in columns), strict=True), flags, strict=True
            )
        )
