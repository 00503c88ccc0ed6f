"""What an edit changes outside of its region, seen at one step and carried to all later ones.

The keys and values of outside tokens depend on the edit too: they attend to its prompt and to what is being painted. A
row therefore computes its first step in full; by how much its outside tokens differ there from the template's is added
to every entry that serves it later. FlashPS has no such step; decision record 0009 has the measurements.
"""

from __future__ import annotations

from torch import Tensor

from giornata.packed.region import Region
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.rows.stored import Stored, store


class Correction:
    """Of one sequence; satisfies :class:`giornata.packed.uses.Recorder` for the step that is computed in full.

    Args:
        slabs: the sequence's own, of the entry that serves that step; they hold its own values afterwards.
        region: of the row.
        bits: in which the differences are kept; see :mod:`giornata_denoiser.rows.stored`.
    """

    def __init__(self, slabs: Slabs, region: Region, bits: int) -> None:
        self._slabs, self._outside, self._bits = slabs, region.outside, bits
        self._deltas: dict[tuple[int, str], Stored] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        if self._slabs.entry.blocks[block].hidden is not None:
            self._take(block, "hidden", hidden, self._slabs.hidden(block))

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        if self._slabs.entry.blocks[block].key is not None:
            slab = self._slabs.keys_values(block)
            self._take(block, "key", key.flatten(1), slab.key[slab.room :].flatten(1))
            self._take(block, "value", value.flatten(1), slab.value[slab.room :].flatten(1))

    def of(self, block: int, part: str) -> Stored | None:
        """What is added to a block's `key`, `value` or `hidden`, (outside, channels), of another entry."""
        return self._deltas.get((block, part))

    def _take(self, block: int, part: str, own: Tensor, template: Tensor) -> None:
        """Keep own - template; `template` (outside, channels) becomes the own one."""
        own = own.index_select(0, self._outside)
        self._deltas[block, part] = store(own - template, self._bits)
        template.copy_(own)
