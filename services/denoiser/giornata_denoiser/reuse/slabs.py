"""Slabs: what one sequence takes from one entry, gathered to its outside tokens on the engine's device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from giornata.planning.blocks import Mode
from giornata_denoiser.attention import Outside
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.region import Region
from giornata_denoiser.reuse.stored import Stored
from giornata_denoiser.reuse.template import Entry

Slab = Outside | Tensor


class Slabs:
    """A source of one sequence; satisfies :class:`giornata_denoiser.reuse.uses.Source`.

    A slab is gathered and dequantised once and kept: consecutive steps that are served by one entry move nothing. Keys
    and values have room for the sequence's own tokens in front of them. One that is expected is waited for, until
    whoever loads ahead has loaded it; another is loaded by whoever asks.

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
        self._slabs: dict[tuple[int, Mode], Future[Slab]] = {}

    def keys_values(self, block: int) -> Outside:
        """(own + outside, heads, head_dim) each, the first `own` rows free.

        Raises:
            LookupError: the entry has none.
        """
        slab = self._slab(block, Mode.KV)
        if not isinstance(slab, Outside):
            raise TypeError("keys and values were loaded as something else")
        return slab

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim); LookupError as above."""
        slab = self._slab(block, Mode.HIDDEN)
        if not isinstance(slab, Tensor):
            raise TypeError("a block's input was loaded as something else")
        return slab

    def size_bytes(self, block: int, mode: Mode) -> int:
        """Of a slab as it is kept here; 0 in a mode that takes nothing."""
        width = self._family.dtype.itemsize * len(self._index)
        kept = self.entry.blocks[block]
        parts = {Mode.KV: (kept.key, kept.value), Mode.HIDDEN: (kept.hidden,), Mode.FULL: ()}[mode]
        return sum(width * part.shape[1] for part in parts if part is not None)

    def has(self, block: int, mode: Mode) -> bool:
        """Whether the slab is here, or expected."""
        return (block, mode) in self._slabs

    def expect(self, block: int, mode: Mode) -> None:
        """Somebody will :meth:`load` it; who asks before waits."""
        self._slabs[block, mode] = Future()

    def load(self, block: int, mode: Mode, pause: Callable[[], None] = lambda: None) -> None:
        """Gather an expected slab, in any thread; what goes wrong is raised to who asks for it.

        `pause` is called before the slab is handed out.
        """
        slot = self._slabs[block, mode]
        try:
            slab = self._gather(block, mode)
            pause()
            slot.set_result(slab)
        except Exception as error:  # noqa: BLE001 - a thread's edge: who asks for the slab is told
            slot.set_exception(error)

    def _slab(self, block: int, mode: Mode) -> Slab:
        if (block, mode) not in self._slabs:
            self.expect(block, mode)
            self.load(block, mode)
        return self._slabs[block, mode].result()

    def _gather(self, block: int, mode: Mode) -> Slab:
        kept = self.entry.blocks[block]
        if mode is Mode.HIDDEN:
            return self._gathered(kept.hidden, 0)
        key, value = (
            _heads(self._gathered(part, self._own), self._family.heads) for part in (kept.key, kept.value)
        )
        return Outside(key, value, self._own)

    def _gathered(self, stored: Stored | None, room: int) -> Tensor:
        if stored is None:
            raise LookupError("the template's entry does not hold what the plan takes from it")
        family = self._family
        slab = torch.empty(room + len(self._index), stored.shape[1], dtype=family.dtype, device=family.device)
        stored.gather(self._index, slab[room:])
        return slab


def _heads(slab: Tensor, heads: int) -> Tensor:
    """(tokens, heads * head_dim) → (tokens, heads, head_dim)."""
    return slab.view(len(slab), heads, -1)
