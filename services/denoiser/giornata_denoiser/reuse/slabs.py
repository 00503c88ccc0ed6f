"""Slabs: what one sequence takes from one entry, gathered to its outside tokens on the engine's device."""

from __future__ import annotations

import torch
from torch import Tensor

from giornata_denoiser.attention import Outside
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.region import Region
from giornata_denoiser.reuse.stored import Stored
from giornata_denoiser.reuse.template import Entry


class Slabs:
    """A source of one sequence; satisfies :class:`giornata_denoiser.reuse.uses.Source`.

    A slab is gathered and dequantised when it is first asked for, or loaded ahead, and kept: consecutive steps that
    are served by one entry move nothing. Keys and values have room for the sequence's own tokens in front of them.

    Args:
        entry: of the template.
        region: of the row.
        own: tokens that the sequence computes where it takes keys and values: text, and the region's.
        family: whose heads, dtype and device the slabs have.
    """

    def __init__(self, entry: Entry, region: Region, own: int, family: Family) -> None:
        self.entry = entry
        self._index = region.outside.cpu()
        self._own, self._family = own, family
        self._keys_values: dict[int, Outside] = {}
        self._hidden: dict[int, Tensor] = {}

    def keys_values(self, block: int) -> Outside:
        """(own + outside, heads, head_dim) each, the first `own` rows free.

        Raises:
            LookupError: the entry has none.
        """
        if block not in self._keys_values:
            kept = self.entry.blocks[block]
            self._keys_values[block] = Outside(
                self._gathered(kept.key, self._own).unflatten(1, (self._family.heads, -1)),
                self._gathered(kept.value, self._own).unflatten(1, (self._family.heads, -1)),
                self._own,
            )
        return self._keys_values[block]

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim); LookupError as above."""
        if block not in self._hidden:
            self._hidden[block] = self._gathered(self.entry.blocks[block].hidden, 0)
        return self._hidden[block]

    def _gathered(self, stored: Stored | None, room: int) -> Tensor:
        if stored is None:
            raise LookupError("the template's entry does not hold what the plan takes from it")
        family = self._family
        slab = torch.empty(room + len(self._index), stored.shape[1], dtype=family.dtype, device=family.device)
        stored.gather(self._index, slab[room:])
        return slab
