"""The best plan of a small batch by trying every one, vectorised over all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from giornata.planning.batch_plans import BatchRow
from giornata.planning.block_plans import MODES, LoadLink
from giornata.wire.values import BlockMode

FULL, KV = MODES.index(BlockMode.FULL), MODES.index(BlockMode.KV)


def best_ms(rows: Sequence[BatchRow], link: LoadLink) -> float:
    """The earliest end of `rows`; 3^(rows * blocks) plans, so small batches only."""
    count, blocks = len(rows), len(rows[0].blocks)
    every = 3 ** (count * blocks)
    plans = np.arange(every)
    now, slabs = np.zeros(every), np.zeros(every)
    live = np.zeros((count, every), bool)
    for place in range(blocks):
        computing = np.zeros(every)
        entries: dict[tuple[object, bool], NDArray[np.float64]] = {}
        for index, row in enumerate(rows):
            mode = plans // 3 ** (index * blocks + place) % 3
            computing += _of_mode(row, place, live[index], "ms")[mode, plans]
            needed = _of_mode(row, place, live[index], "slabs")[mode, plans]
            for keys_values in (True, False):
                own = np.where((mode == KV) == keys_values, needed, 0.0)
                key = (row.template, keys_values)
                entries[key] = np.maximum(entries.get(key, np.zeros(every)), own)
            live[index] = mode == FULL
        needed = np.sum(list(entries.values()), axis=0)
        slabs += needed
        there = np.where(needed > 0, link.busy_ms + slabs * link.slab_ms, 0.0)
        now = np.maximum(now, there) + computing
    return float(now.min())


def _of_mode(row: BatchRow, place: int, live: NDArray[np.bool_], what: str) -> NDArray[np.float64]:
    """(modes, plans): what each mode of a block computes in ms, or loads in slabs, where `live` is as it is."""
    block = row.blocks[place]
    ask = block.compute_ms if what == "ms" else block.slabs
    return np.stack([np.where(live, ask(mode, live=True), ask(mode, live=False)) for mode in MODES])
