"""A template as it is kept: entries by noise level, their activations, and corrections. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.attention import QuantisedTensor
from giornata.packed.packing import Region
from giornata.wire.models import MOMENTS, PARTS
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import BITS, EXACT

ALIGNMENT: Final = 64
"""Bytes: tensors of one pinned block begin at multiples of it, so that kernels read 16 at once."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One (tokens, channels) tensor.

    Quantised channels are affine: value = low + level * scale, each channel (of each head) with its own, since keys
    have a few channels that are much larger than the others.
    """

    data: Tensor
    """(tokens, channels) as computed; (tokens, channels) uint8 in 8 bits; in 4 bits (tokens, channels / 2) uint8, a
    level of the channels' first half in the low nibble and one of the second half in the high nibble."""
    scale: Tensor | None = None
    """(channels,) float32; None where the data are exact."""
    low: Tensor | None = None
    """(channels,) float32."""

    @property
    def bits(self) -> int:
        """0 for exact data."""
        if self.scale is None:
            return EXACT
        return 8 if len(self.scale) == self.data.shape[1] else 4

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def finite(self) -> bool:
        """Return whether every value is; quantised ones are where their ranges are."""
        ranges = [part for part in (self.scale, self.low) if part is not None]
        return all(bool(part.isfinite().all()) for part in ranges or [self.data])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its data, and scale and low where it has them."""
        return (self.data, *(part for part in (self.scale, self.low) if part is not None))

    @property
    def levels(self) -> QuantisedTensor:
        """The same as kernels read it."""
        return QuantisedTensor(self.data, self.scale, self.low)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and channels."""
        return self.data.shape[0], self.channels

    @property
    def channels(self) -> int:
        """Channels of every token."""
        return (self.data if self.scale is None else self.scale).shape[-1]

    def to(self, device: torch.device) -> StoredTensor:
        """The same on `device`; the copy is asynchronous from pinned memory."""
        return self.each(lambda part: part.to(device, non_blocking=True))

    def pinned(self) -> StoredTensor:
        """The same in pinned host memory, from which copies to a CUDA device are asynchronous."""
        return self.each(lambda part: part.cpu().pin_memory())

    def rows(self, index: Tensor) -> StoredTensor:
        """The tokens `index` (n,), int64, alone."""
        return StoredTensor(self.data.index_select(0, index), self.scale, self.low)

    def narrowed(self, channels: Sequence[slice]) -> StoredTensor:
        """These ranges of channels alone, one behind the other: views where there is one and it is not in 4 bits.

        In 4 bits they are packed again: their first half in the low nibbles.

        Raises:
            ValueError: these are an odd number of channels in 4 bits.
        """
        scale, low = (None if part is None else _ranges(part, channels) for part in (self.scale, self.low))
        if self.bits != 4:
            return StoredTensor(_ranges(self.data, channels), scale, low)
        levels = _ranges(torch.cat((self.data & 15, self.data >> 4), dim=1), channels)
        if levels.shape[1] % 2:
            raise ValueError(f"received {levels.shape[1]} channels in 4 bits; accepted are even numbers")
        first, second = levels.chunk(2, dim=1)
        return StoredTensor(first | (second << 4), scale, low)

    def each(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        """The same with every tensor changed."""
        scale, low = (None if part is None else change(part) for part in (self.scale, self.low))
        return StoredTensor(change(self.data), scale, low)

    def scaled(self, factor: float) -> StoredTensor:
        """The same with all values so many times as large."""
        if self.scale is None or self.low is None:
            return StoredTensor(self.data * factor)
        return StoredTensor(self.data, self.scale * factor, self.low * factor)

    def gather(self, index: Tensor, out: Tensor) -> None:
        """Write the tokens `index` (n,), int64, into `out` (n, channels); all on this tensor's device."""
        chosen = self.data.index_select(0, index)
        if self.scale is None or self.low is None:
            out.copy_(chosen)
            return
        for part, levels in self._halves(chosen):
            out[:, part].copy_(levels)
        torch.addcmul(self.low.to(out.dtype), out, self.scale.to(out.dtype), out=out)

    def add_to(self, out: Tensor, factor: float = 1.0) -> None:
        """Add all tokens, `factor` times, to `out`, (tokens, channels) on this tensor's device."""
        if self.scale is None or self.low is None:
            out.add_(self.data, alpha=factor)
            return
        scale, low = self.scale.to(out.dtype), self.low.to(out.dtype)
        for part, levels in self._halves(self.data):
            added = out[:, part].addcmul_(levels.to(out.dtype), scale[part], value=factor)
            added.add_(low[part], alpha=factor)

    def _halves(self, data: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Channels and levels of what `data` packs, one part at a time: all in 8 bits, one half and the other in 4."""
        width = data.shape[1]
        if self.bits == 8:
            yield slice(width), data
        else:
            yield slice(width), data & 15
            yield slice(width, 2 * width), data >> 4


def _ranges(tensor: Tensor, channels: Sequence[slice]) -> Tensor:
    """Ranges of a tensor's last dimension, one behind the other."""
    parts = [tensor[..., span] for span in channels]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def pin_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in pinned host memory, in few blocks: torch makes each block as large as the next power of two."""
    places = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    copies, left, block = list[Tensor](), sum(places), torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, places, strict=True):
        if size > len(block):
            wanted = max(1 << left.bit_length() >> 1, size)
            block = torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
        copies.append(block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        block, left = block[size:], left - size
    return copies


def bits_of(part: str, bits: int) -> int:
    """The bits in which a part is kept where a recording has so many: a picture's statistics stay exact."""
    return EXACT if part == MOMENTS else bits


def stored_bytes(tokens: int, channels: int, bits: int, itemsize: int) -> int:
    """Bytes of (tokens, channels) in `bits`, ranges included; `itemsize` bytes an element where they are exact."""
    if bits == EXACT:
        return tokens * channels * itemsize
    return tokens * channels * bits // 8 + 2 * channels * torch.float32.itemsize


def store(tensor: Tensor, bits: int) -> StoredTensor:
    """A copy of (tokens, channels) in `bits`, on its device.

    Raises:
        ValueError: other bits than :data:`BITS`, or 4 bits of an odd number of channels.
    """
    if bits not in BITS or (bits == 4 and tensor.shape[1] % 2):
        raise ValueError(
            f"received {bits} bits for {tensor.shape[1]} channels; accepted are 0, 8, and 4 for even numbers"
        )
    if bits == EXACT:
        return StoredTensor(tensor.detach().clone(memory_format=torch.contiguous_format))
    values = tensor.detach().float()
    shown = values if len(values) else values.new_zeros(1, values.shape[1])  # a share may have no token
    low, high = shown.amin(dim=0), shown.amax(dim=0)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    levels = ((values - low) / scale).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        first, second = levels.chunk(2, dim=1)
        levels = first | (second << 4)
    return StoredTensor(levels, scale, low)


LEAST: Final = 0.25
"""The noise level below which differences shrink no more."""


def shrinkage(level: float) -> float:
    """Return how large differences are at a noise level, of what they are at 1; decision record 0009 says why."""
    return math.sqrt(max(level, LEAST))


@dataclass(frozen=True, eq=False)
class Correction:
    """The differences of one sequence.

    The keys and values of outside tokens depend on the edit too: they attend to its prompt and to what is being
    painted. By how much they differ from the template's at one noise level is added to every entry that serves a row.
    FlashPS has no such thing. It belongs to the template and the mask, hardly to prompt or seed, so that later edits
    take the one that an earlier edit learned; decision record 0009 has the measurements.
    """

    deltas: Mapping[tuple[int, str], StoredTensor]
    """(outside, channels) each: what is added to a part of a block at the highest noise level."""
    group: str = ""
    """The processes of which this one has learned a part of it, and none the rest; empty where it is whole."""

    def of(self, block: int, part: str) -> StoredTensor | None:
        """Return what is added to this part of a block; None where it kept no such part."""
        return self.deltas.get((block, part))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all differences."""
        return sum(delta.size_bytes for delta in self.deltas.values())

    def narrowed(self, index: Tensor) -> Correction:
        """That of the outside tokens `index` (n,), int64, alone."""
        return replace(self, deltas={place: delta.rows(index) for place, delta in self.deltas.items()})

    def pinned(self) -> Correction:
        """The same in pinned host memory."""
        return replace(self, deltas={place: delta.pinned() for place, delta in self.deltas.items()})


FILE_BYTES: Final = 512
"""Most that a template's file takes for one tensor of a block beside its bytes."""


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """The cache of one block at one noise level: all, one form, or nothing."""

    key: StoredTensor | None = None
    """(tokens, heads * head_dim)"""
    value: StoredTensor | None = None
    """As `key`."""
    hidden: StoredTensor | None = None
    """(tokens, inner_dim)"""
    border: StoredTensor | None = None
    """(tokens, channels): of a convolution's input the cells at the border of each token."""
    moments: StoredTensor | None = None
    """(tokens, channels): of a group norm's input each token's means and sums of squared differences; exact."""
    picture: StoredTensor | None = None
    """(tokens, channels), of the first block alone, and exact: the picture in the run's latent, which is that picture
    noised. Only of networks that do not blend: the runs of others are held to the template's own picture."""

    def each(self, change: Callable[[Tensor], Tensor]) -> CachedBlock:
        """The same with every tensor of what was kept changed."""
        return CachedBlock(**{name: part and part.each(change) for name, part in vars(self).items()})

    def taken(self, mode: BlockMode) -> tuple[StoredTensor, ...]:
        """The kept parts that a block in `mode` takes."""
        return tuple(part for _, part in self.named(mode))

    def named(self, mode: BlockMode) -> Iterator[tuple[str, StoredTensor]]:
        """The same with their names."""
        parts = ((name, self.part(name)) for name in PARTS[mode])
        return ((name, part) for name, part in parts if part is not None)

    def part(self, name: str) -> StoredTensor | None:
        """The part of this name; None where it was not kept."""
        found: StoredTensor | None = getattr(self, name)
        return found

    @property
    def parts(self) -> Iterator[StoredTensor]:
        """The parts that were kept."""
        return (part for part in vars(self).values() if part is not None)

    @property
    def cheapest(self) -> BlockMode:
        """The mode that computes least of what was kept."""
        if self.taken(BlockMode.KV):
            return BlockMode.KV
        return BlockMode.FULL if self.hidden is None else BlockMode.HIDDEN


@dataclass(frozen=True, eq=False)
class Entry:
    """One noise level of a template run."""

    level: float
    blocks: tuple[CachedBlock, ...]

    @cached_property
    def modes(self) -> tuple[BlockMode, ...]:
        """The modes that compute least, if everything that was kept is here.

        A block that kept nothing computes in full; where the outside tokens' hidden state is gone by then, so must all
        blocks before it, back to one that kept their input.
        """
        modes = [kept.cheapest for kept in self.blocks]
        for block in range(len(modes) - 1, 0, -1):
            if modes[block] is BlockMode.FULL and self.blocks[block].hidden is None:
                modes[block - 1] = BlockMode.FULL
        return tuple(modes)

    @cached_property
    def channels(self) -> Mapping[BlockMode, NDArray[np.int64]]:
        """(blocks,) of each form: the channels a token of what each block kept; 0 where it kept no such form."""
        return {
            mode: np.array(
                [sum(part.channels for part in kept.taken(mode)) for kept in self.blocks], np.int64
            )
            for mode in (BlockMode.KV, BlockMode.HIDDEN)
        }

    def pinned(self) -> Entry:
        """The same in pinned host memory, side by side."""
        own = {id(each): each for block in self.blocks for part in block.parts for each in part.tensors}
        copies = dict(zip(own, pin_tensors(list(own.values())), strict=True))
        return replace(self, blocks=tuple(block.each(lambda each: copies[id(each)]) for block in self.blocks))

    @property
    def size_bytes(self) -> int:
        """Bytes of all that its blocks kept."""
        return sum(part.size_bytes for block in self.blocks for part in block.parts)


@dataclass(frozen=True, eq=False)
class CachedTemplate:
    """The entries of one template run, or of an edit that found none."""

    id: str
    grid: tuple[int, int]
    """Height and width in tokens."""
    entries: tuple[Entry, ...]
    """In the order of the run, level falling."""
    edited: Region | None = None
    """What an edit has repainted: its entries show the picture outside of it alone. None for a template run's."""
    noise: Tensor | None = None
    """(tokens, channels): what that edit began with; None for :func:`template_noise`."""

    def __post_init__(self) -> None:
        """Read off each entry what plans need: the step that first takes from it is not to wait for that."""
        for entry in self.entries:
            _ = entry.modes, entry.channels

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries, and of noise of its own."""
        noise = 0 if self.noise is None else self.noise.nbytes
        return noise + sum(entry.size_bytes for entry in self.entries)

    @property
    def finite(self) -> bool:
        """Return whether every value of it is."""
        return all(part.finite for entry in self.entries for block in entry.blocks for part in block.parts)

    def noise_beside(self, own: Tensor, where: Region) -> Tensor:
        """A row's noise that takes from it: its `own` (tokens, channels) in its region, the recorded outside."""
        recorded = template_noise(*own.shape) if self.noise is None else self.noise
        noise = recorded.to(own.device, own.dtype, copy=True)
        noise[where.computed] = own[where.computed]
        return noise

    def pinned(self) -> CachedTemplate:
        """The same in pinned host memory; see :meth:`giornata_denoiser.rows.template.StoredTensor.pinned`."""
        return replace(self, entries=tuple(entry.pinned() for entry in self.entries))

    def at(self, level: float, tolerance: float = 1.0) -> Entry | None:
        """The entry of the nearest noise level; None if none lies within `tolerance`."""
        return self.at_each([level], tolerance)[0]

    def at_each(self, levels: Sequence[float], tolerance: float = 1.0) -> tuple[Entry | None, ...]:
        """:meth:`at` of every one of `levels`."""
        if not self.entries:
            return (None,) * len(levels)
        far = np.abs(np.array([entry.level for entry in self.entries])[:, np.newaxis] - np.asarray(levels))
        nearest = far.argmin(axis=0).tolist()
        return tuple(
            self.entries[index] if distance <= tolerance else None
            for index, distance in zip(nearest, far.min(axis=0).tolist(), strict=True)
        )


@lru_cache(maxsize=8)  # 1 MiB each for 1024x1024 pixels of Flux
def template_noise(tokens: int, channels: int) -> Tensor:
    """(tokens, channels) float32 on the CPU, always the same: what a template run begins with. Not to be changed."""
    return torch.randn(tokens, channels, generator=torch.Generator("cpu").manual_seed(0))


def template_generator() -> Tensor:
    """The state of a generator, always the same: what noise a template run's sampler adds, if any."""
    return torch.Generator("cpu").manual_seed(0).get_state()
