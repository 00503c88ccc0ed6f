"""A row's own activations of tokens that not every step computes: kept from one step, taken by those after it.

These are tokens of the picture outside its region, and tokens that pad its prompt.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from giornata.packed.kept import CachedKV
from giornata.packed.pages import KVPages
from giornata.planning.specs import together
from giornata_denoiser.choices import EXACT
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.stored import StoredTensor, bits_of, store

SHORT: Final = 3
"""Most steps from one in full to the next where what a network makes of the picture changes quickly;
`docs/results/reuse.md` has the measurements."""
OWN_BITS: Final = 8
"""Where rows learn no corrections, or exact ones."""


def renew_steps(configured: int, family: ModelFamily) -> int:
    """At most so many steps from one in full to the next; 0 computes all in full.

    A network that blends learns of the picture around the mask from its latent alone, which changes from step to step:
    what it makes of it lasts for fewer steps. A UNet, whose blocks are taken together, computes all of them: renewed
    more often, its pictures are still too far from those of full computation: decision record 0013.
    """
    if together(family.specs):
        return 0
    return min(configured, SHORT) if family.network.blends else configured


def own_bits(correction_bits: int | None) -> int:
    """The bits in which a device that keeps no slabs keeps them: those of corrections, if they have any."""
    return correction_bits or OWN_BITS


class OwnKeysValues(CachedKV):
    """What one sequence keeps, in `bits` where there are any: see :mod:`giornata_denoiser.rows.stored`.

    What is kept in bits lies by itself, without room for the sequence's own.
    """

    def __init__(self, index: Tensor | None, own: int, bits: int | None = None) -> None:
        super().__init__(index, own)
        self._bits = bits
        self._places: Tensor | None = None
        """(kept,) int64: all of what is kept in bits."""
        self._parts: dict[tuple[int, str], tuple[StoredTensor, torch.dtype]] = {}

    def part(self, block: int, part: str) -> Tensor:
        """(outside, channels); LookupError as :meth:`keys_values`."""
        kept, dtype = self._parts[block, part]
        return kept.data if kept.scale is None else kept.levels.rows().to(dtype)

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of which it keeps its own."""
        if self._bits is None:
            super().keep(block, key, value)
            return
        key, value = self._of(key), self._of(value)
        if self._places is None:
            self._places = torch.arange(len(key), device=key.device)
        stored = (store(part.flatten(1), self._bits).levels for part in (key, value))
        self._kept[block] = KVPages(self._places, *stored)

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels), of which it keeps its own."""
        own = self._of(kept)
        bits = bits_of(part, self._bits or EXACT)
        self._parts[block, part] = (StoredTensor(own) if bits == EXACT else store(own, bits)), kept.dtype
