"""Activations as a template keeps them: as they were, or in 8 or 4 bits per channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

EXACT: Final = 0
"""Bits of a tensor that is kept in the dtype that it was computed in."""
BITS: Final = (EXACT, 8, 4)


@dataclass(frozen=True, eq=False)
class Stored:
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
        """Of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that there are."""
        return (self.data, *(part for part in (self.scale, self.low) if part is not None))

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and channels."""
        return self.data.shape[0], self.data.shape[1] if self.scale is None else len(self.scale)

    def to(self, device: torch.device) -> Stored:
        """On `device`; asynchronously from pinned memory."""
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pinned(self) -> Stored:
        """In pinned host memory, from which a CUDA device is reached asynchronously."""
        return self._each(lambda part: part.cpu().pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Stored:
        scale, low = (None if part is None else change(part) for part in (self.scale, self.low))
        return Stored(change(self.data), scale, low)

    def gather(self, index: Tensor, out: Tensor) -> None:
        """Write the tokens `index` (n,), int64, into `out` (n, channels); all on this tensor's device."""
        chosen = self.data.index_select(0, index)
        if self.scale is None or self.low is None:
            out.copy_(chosen)
            return
        scale, low = (part.to(out.dtype) for part in (self.scale, self.low))
        half = chosen.shape[1]
        for levels, channels in _levels(chosen, self.bits):
            part = slice(channels * half, (channels + 1) * half)
            torch.addcmul(low[part], levels.to(out.dtype), scale[part], out=out[:, part])

    def add_to(self, out: Tensor) -> None:
        """Add all tokens to `out`, (tokens, channels) on this tensor's device."""
        if self.scale is None or self.low is None:
            out += self.data
            return
        scale, low = (part.to(out.dtype) for part in (self.scale, self.low))
        half = self.data.shape[1]
        for levels, channels in _levels(self.data, self.bits):
            part = slice(channels * half, (channels + 1) * half)
            out[:, part].addcmul_(levels.to(out.dtype), scale[part]).add_(low[part])


def _levels(data: Tensor, bits: int) -> tuple[tuple[Tensor, int], ...]:
    """Levels and the number of their channels' half, of which 8 bits have one."""
    return ((data, 0),) if bits == 8 else ((data & 15, 0), (data >> 4, 1))


def store(tensor: Tensor, bits: int) -> Stored:
    """A copy of (tokens, channels) in `bits`, on its device.

    Raises:
        ValueError: other bits than :data:`BITS`, or 4 bits of an odd number of channels.
    """
    if bits not in BITS or (bits == 4 and tensor.shape[1] % 2):
        raise ValueError(
            f"received {bits} bits for {tensor.shape[1]} channels; accepted are 0, 8, and 4 for even numbers"
        )
    if bits == EXACT:
        return Stored(tensor.detach().clone(memory_format=torch.contiguous_format))
    values = tensor.detach().float()
    low, high = values.amin(dim=0), values.amax(dim=0)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    levels = ((values - low) / scale).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        first, second = levels.chunk(2, dim=1)
        levels = first | (second << 4)
    return Stored(levels, scale, low)
