"""Activations as a template keeps them: as they were, or in 8 or 4 bits per channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from giornata.packed.pages import QuantisedTensor
from giornata.wire.blocks import MOMENTS
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
        """Whether every value is; quantised ones are where their ranges are."""
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
        levels = torch.cat([self._unpacked(span) for span in channels], dim=1)
        if levels.shape[1] % 2:
            raise ValueError(f"received {levels.shape[1]} channels in 4 bits; accepted are even numbers")
        first, second = levels.chunk(2, dim=1)
        return StoredTensor(first | (second << 4), scale, low)

    def _unpacked(self, channels: slice) -> Tensor:
        """(tokens, channels) uint8: the levels in 4 bits of a range of channels."""
        half = self.data.shape[1]
        low = self.data[:, channels.start : min(channels.stop, half)] & 15
        high = self.data[:, max(channels.start - half, 0) : max(channels.stop - half, 0)] >> 4
        return torch.cat((low, high), dim=1)

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


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
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
