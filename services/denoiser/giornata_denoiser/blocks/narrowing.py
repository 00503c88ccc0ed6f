"""What one process takes of entries and corrections where batches are shared: of its heads, and of its tokens."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from giornata.packed.region import Region
from giornata.packed.shares import Shard
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import StoredTensor
from giornata_denoiser.rows.template import CachedBlock, Entry


class CacheSharder:
    """Narrows to what a process of `family` takes; everything stays as it is where that computes whole batches."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self._entries: WeakKeyDictionary[Entry, Entry] = WeakKeyDictionary()

    def entry(self, whole: Entry | None) -> Entry | None:
        """Keys and values of the process's heads; hidden states as they are. One entry is narrowed once."""
        share = self._family.share
        if share is None or whole is None:
            return whole
        if whole not in self._entries:
            blocks = tuple(self._block(share, block, kept) for block, kept in enumerate(whole.blocks))
            narrow = replace(whole, blocks=blocks)
            self._entries[whole] = narrow.pinned() if self._family.device.type == "cuda" else narrow
        return self._entries[whole]

    def correction(self, whole: Correction, region: Region) -> Correction:
        """The same of a correction, and hidden states of the process's tokens alone; `region` is the row's."""
        share = self._family.share
        if share is None or whole.group:
            return whole
        outside = region.outside.cpu()
        own = torch.searchsorted(outside, share.portion(region.on(outside.device)).outside)
        deltas = {
            (block, part): delta.rows(own.to(delta.data.device))
            if part == "hidden"
            else self._by_head(share, block, delta)
            for (block, part), delta in whole.deltas.items()
        }
        return Correction(deltas, self._family.group)

    def fitting(self, row: Row) -> Row:
        """`row` without corrections of which another group has learned parts: it learns its own in a step in full."""
        fit = {"", self._family.group}
        if row.corrections is None or all(each.group in fit for each in row.corrections):
            return row
        return replace(row, corrections=None)

    def _block(self, share: Shard, block: int, kept: CachedBlock) -> CachedBlock:
        if kept.key is None or kept.value is None:
            return kept
        key, value = (self._by_head(share, block, part) for part in (kept.key, kept.value))
        return replace(kept, key=key, value=value)

    def _by_head(self, share: Shard, block: int, stored: StoredTensor) -> StoredTensor:
        heads, sites = self._family.specs[block].heads, self._family.sites(block)
        narrow = stored.narrowed(share.channels(stored.channels, heads, sites))
        # What is copied to another device is copied from memory of its own.
        return narrow.each(torch.Tensor.contiguous) if self._family.device.type == "cuda" else narrow
