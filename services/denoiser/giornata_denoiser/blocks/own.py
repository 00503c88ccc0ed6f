"""A row's own activations of the tokens outside its region: kept from a step in full, taken by those after it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from giornata.packed.attention import Outside
from giornata.packed.pages import Pages
from giornata.packed.region import Region
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.stored import EXACT, Stored, bits_of, store

UNSEEN: Final = 3
"""Most steps from one in full to the next where the network sees no mask; decision record 0029 has the measurements."""
OWN_BITS: Final = 8
"""Where rows learn no corrections, or exact ones."""


def renew_steps(configured: int, family: ModelFamily) -> int:
    """At most so many steps from one in full to the next; 0 computes all in full.

    A network that blends learns of the picture around the mask from its latent alone, which changes from step to step:
    what it makes of it lasts for fewer steps.
    """
    return min(configured, UNSEEN) if family.network.blends else configured


def own_bits(correction_bits: int | None) -> int:
    """The bits in which a device that keeps no slabs keeps them: those of corrections, if they have any."""
    return correction_bits or OWN_BITS


class OwnKeysValues:
    """What one sequence keeps; satisfies :class:`giornata.packed.uses.Source`.

    `own` are the tokens that it computes between two steps in full: text, and the region's. There is room for their
    keys and values in front of those that are kept; in `bits` these are kept by themselves, see
    :mod:`giornata_denoiser.rows.stored`.
    """

    def __init__(self, region: Region, own: int, family: ModelFamily, bits: int | None = None) -> None:
        self._outside = region.on(family.device).outside
        self._own, self._bits = own, bits
        self._all = torch.arange(len(self._outside), device=family.device)
        self._kept: dict[int, Outside | Pages] = {}
        self._parts: dict[tuple[int, str], Stored] = {}
        self._dtype = family.dtype

    def keys_values(self, block: int) -> Outside | Pages:
        """(own + outside, heads, head_dim) each, the first `own` rows free; or as they are stored.

        Raises:
            LookupError: no step in full has passed the block.
        """
        return self._kept[block]

    def hidden(self, block: int) -> Tensor:
        """Nothing is kept of a block's input.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the input of block {block} is not kept")

    def part(self, block: int, part: str) -> Tensor:
        """(outside, channels); LookupError as :meth:`keys_values`."""
        kept = self._parts[block, part]
        return kept.data if kept.scale is None else kept.levels.rows().to(self._dtype)

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of all tokens of the picture."""
        if self._bits is not None:
            parts = (part.index_select(0, self._outside).flatten(1) for part in (key, value))
            self._kept[block] = Pages(self._all, *(store(part, self._bits).levels for part in parts))
            return
        kept = self._kept.get(block)
        if not isinstance(kept, Outside):
            shape = self._own + len(self._outside), *key.shape[1:]
            kept = self._kept[block] = Outside(key.new_empty(shape), value.new_empty(shape), self._own)
        torch.index_select(key, 0, self._outside, out=kept.key[self._own :])
        torch.index_select(value, 0, self._outside, out=kept.value[self._own :])

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels), of all tokens of the picture."""
        outside = kept.index_select(0, self._outside)
        bits = bits_of(part, self._bits or EXACT)
        self._parts[block, part] = Stored(outside) if bits == EXACT else store(outside, bits)


class OwnRecorder:
    """Fills what a sequence keeps in a step in full, whose :class:`giornata.packed.uses.ActivationRecorder` it is."""

    def __init__(self, kept: OwnKeysValues) -> None:
        self._kept = kept

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nothing is kept of a block's input."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        self._kept.keep(block, key, value)

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        self._kept.keep_part(block, part, kept)
