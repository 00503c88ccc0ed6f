"""A row's own activations of tokens that not every step computes: kept from one step, taken by those after it.

These are tokens of the picture outside its region, and tokens that pad its prompt.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from giornata.packed.attention import Outside
from giornata.packed.pages import Pages
from giornata.planning.specs import together
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.stored import EXACT, Stored, bits_of, store

SHORT: Final = 3
"""Most steps from one in full to the next where what a network makes of the picture changes quickly; decision record
0029 has the measurements."""
OWN_BITS: Final = 8
"""Where rows learn no corrections, or exact ones."""


def renew_steps(configured: int, family: ModelFamily) -> int:
    """At most so many steps from one in full to the next; 0 computes all in full.

    A network that blends learns of the picture around the mask from its latent alone, which changes from step to step:
    what it makes of it lasts for fewer steps. A UNet, whose blocks are taken together, computes all of them: even
    renewed more often, its pictures are too far from those of full computation; decision record 0034 has the
    measurements.
    """
    if together(family.specs):
        return 0
    return min(configured, SHORT) if family.network.blends else configured


def own_bits(correction_bits: int | None) -> int:
    """The bits in which a device that keeps no slabs keeps them: those of corrections, if they have any."""
    return correction_bits or OWN_BITS


class OwnKeysValues:
    """What one sequence keeps; satisfies :class:`giornata.packed.uses.Source`.

    `index`, (kept,) int64 on the device, are the tokens that are kept of those that a recorder shows; None keeps all.
    There is room for the keys and values of `own` tokens in front of those that are kept; in `bits` these are kept by
    themselves, see :mod:`giornata_denoiser.rows.stored`.
    """

    def __init__(self, index: Tensor | None, own: int, bits: int | None = None) -> None:
        self._index, self._own, self._bits = index, own, bits
        self._kept: dict[int, Outside | Pages] = {}
        self._places: Tensor | None = None
        """(kept,) int64: all of what is kept in bits."""
        self._parts: dict[tuple[int, str], tuple[Stored, torch.dtype]] = {}

    def keys_values(self, block: int) -> Outside | Pages:
        """(own + kept, heads, head_dim) each, the first `own` rows free; or as they are stored.

        Raises:
            LookupError: no step that keeps has passed the block.
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
        kept, dtype = self._parts[block, part]
        return kept.data if kept.scale is None else kept.levels.rows().to(dtype)

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of which it keeps its own."""
        if self._index is not None:
            key, value = key.index_select(0, self._index), value.index_select(0, self._index)
        if self._bits is not None:
            if self._places is None:
                self._places = torch.arange(len(key), device=key.device)
            stored = (store(part.flatten(1), self._bits).levels for part in (key, value))
            self._kept[block] = Pages(self._places, *stored)
            return
        kept = self._kept.get(block)
        if not isinstance(kept, Outside):
            shape = self._own + len(key), *key.shape[1:]
            kept = self._kept[block] = Outside(key.new_empty(shape), value.new_empty(shape), self._own)
        kept.key[self._own :] = key
        kept.value[self._own :] = value

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels), of which it keeps its own."""
        own = kept if self._index is None else kept.index_select(0, self._index)
        bits = bits_of(part, self._bits or EXACT)
        self._parts[block, part] = (Stored(own) if bits == EXACT else store(own, bits)), kept.dtype


class OwnRecorder:
    """Fills what a sequence keeps in a step, whose :class:`giornata.packed.uses.ActivationRecorder` it is."""

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
