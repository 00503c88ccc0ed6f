"""How slabs are made: parts of an entry are brought to the engine's device, gathered to outside tokens, corrected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.planning.specs import together
from giornata.wire.blocks import PARTS
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.correction import Correction, shrinkage
from giornata_denoiser.rows.stored import StoredTensor
from giornata_denoiser.rows.template import Entry


class DeviceEntryPart(NamedTuple):
    """A part of an entry on the device, as it is stored."""

    stored: StoredTensor
    delta: StoredTensor | None
    """What a correction adds to its outside tokens, at the highest noise level."""
    factor: float = 1.0
    """How many times `delta` is added."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.stored.tensors + (() if self.delta is None else self.delta.tensors)


Slab = DenseKV | Tensor | tuple[DeviceEntryPart, ...]
"""Gathered; or as it is stored, on a device that keeps no slabs: key and value, or a block's only part."""


class SlabBuilder:
    """Makes the slabs of one entry for sequences of one region.

    `index` are the outside tokens of each form, (outside,) int64 on the family's device; `own` are the tokens for which
    keys and values have room in front. What a `correction` knows is added.
    """

    def __init__(
        self,
        entry: Entry,
        index: Mapping[BlockMode, Tensor],
        own: int,
        family: ModelFamily,
        *,
        device: Device,
        correction: Correction | None,
    ) -> None:
        self._entry, self._index, self._own = entry, index, own
        self._family, self._device, self._correction = family, device, correction
        self.shrinkage = 1.0 if together(family.specs) else shrinkage(entry.level)
        """The factor of the correction's differences at this noise level; a UNet's were not seen to shrink."""

    def slab(self, block: int, mode: BlockMode) -> Slab:
        """What a block in `mode` takes.

        Raises:
            LookupError: the entry does not hold it.
        """
        brought = tuple(
            self._brought(block, name, part) for name, part in self._entry.blocks[block].named(mode)
        )
        if not brought:
            raise LookupError("the template's entry does not hold what the plan takes from it")
        if not self._device.keeps:
            return brought
        return self.by_head(block, brought, self._own) if len(brought) > 1 else self.written(brought[0], mode)

    def _brought(self, block: int, part: str, stored: StoredTensor) -> DeviceEntryPart:
        """A part on the device, and what is added to it."""
        delta = None if self._correction is None else self._correction.of(block, part)
        if delta is None:
            return DeviceEntryPart(self._device.bring(stored), None)
        added = self._device.bring(delta)
        if self._device.keeps:
            return DeviceEntryPart(self._device.bring(stored), added, self.shrinkage)
        return DeviceEntryPart(self._device.bring(stored), added.scaled(self.shrinkage))

    def by_head(self, block: int, brought: tuple[DeviceEntryPart, ...], room: int) -> DenseKV:
        """Key and value, (room + outside, heads, head_dim) each, the first `room` rows free."""
        tokens, heads = room + len(self._index[BlockMode.KV]), self._family.heads(block)
        key, value = (self.written(part, BlockMode.KV, room).view(tokens, heads, -1) for part in brought)
        return DenseKV(key, value, room)

    def written(self, brought: DeviceEntryPart, mode: BlockMode, room: int = 0) -> Tensor:
        """(room + outside, channels): the outside tokens of a part, corrected, behind room for others."""
        family, stored, index = self._family, brought.stored, self._index[mode]
        dtype = stored.data.dtype if stored.scale is None else family.dtype
        slab = torch.empty(room + len(index), stored.shape[1], dtype=dtype, device=family.device)
        brought.stored.gather(index, slab[room:])
        if brought.delta is not None:
            brought.delta.add_to(slab[room:], brought.factor)
        return slab

    def deltas(self, block: int, mode: BlockMode) -> Iterator[StoredTensor]:
        """What a correction adds to a slab."""
        if self._correction is not None:
            deltas = (self._correction.of(block, part) for part in PARTS[mode])
            yield from (delta for delta in deltas if delta is not None)

    def moved_bytes(self, block: int, mode: BlockMode) -> int:
        """Bytes that have to move for a slab that is not here."""
        parts = self._entry.blocks[block].taken(mode)
        tokens = self._family.dtype.itemsize * len(self._index[mode])
        moved = sum(self._device.moved_bytes(part, tokens * part.shape[1]) for part in parts)
        return moved + sum(self._device.moved_bytes(delta, 0) for delta in self.deltas(block, mode))


def tensors(slab: Slab) -> tuple[Tensor, ...]:
    """All tensors of a slab."""
    if isinstance(slab, DenseKV):
        return slab.key, slab.value
    return (slab,) if isinstance(slab, Tensor) else tuple(tensor for part in slab for tensor in part.tensors)
