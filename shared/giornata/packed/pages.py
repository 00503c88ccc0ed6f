"""Keys and values of outside tokens as they are stored, and how they get into the keys and values of an attention.

Nothing of them is kept in the network's dtype: where a block attends, one kernel gathers the tokens of all sequences,
dequantises them, adds their corrections and writes them behind the sequences' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class QuantisedTensor(NamedTuple):
    """(tokens, channels) as stored: value = low + level * scale, or as computed where there is no scale."""

    data: Tensor
    """(tokens, channels), or uint8 in 8 bits; in 4 bits (tokens, channels / 2) uint8: the first half of the channels in
    the low nibbles, the second half in the high ones."""
    scale: Tensor | None = None
    """(channels,) float32."""
    low: Tensor | None = None
    """As `scale`."""

    @property
    def bits(self) -> int:
        """0 as computed, else 8 or 4."""
        if self.scale is None:
            return 0
        return 8 if len(self.scale) == self.data.shape[1] else 4

    def rows(self, index: Tensor | None = None) -> Tensor:
        """The tokens `index`, (n,) int64, or all: (n, channels), float32 where they are quantised."""
        data = self.data if index is None else self.data.index_select(0, index)
        if self.scale is None or self.low is None:
            return data
        levels = data if self.bits == 8 else torch.cat((data & 15, data >> 4), dim=1)
        return torch.addcmul(self.low, levels.float(), self.scale)


@dataclass(frozen=True, eq=False)
class KVPages:
    """Keys and values that one sequence attends to besides its own, on the device, still as they are stored."""

    index: Tensor
    """(outside,) int64: their rows in `key` and `value`."""
    key: QuantisedTensor
    """(tokens, heads * head_dim), rotated."""
    value: QuantisedTensor
    key_delta: QuantisedTensor | None = None
    """(outside, heads * head_dim): what is added to the key; None adds nothing."""
    value_delta: QuantisedTensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Key and value, corrected: (outside, heads * head_dim) each, float32 where they are quantised or corrected."""
        parts = ((self.key, self.key_delta), (self.value, self.value_delta))
        key, value = (
            levels.rows(self.index) if delta is None else levels.rows(self.index).float() + delta.rows()
            for levels, delta in parts
        )
        return key, value


class PageDestination(NamedTuple):
    """The destination of pages."""

    pages: KVPages
    start: int
    """The first of their rows in the keys and values that are written."""


class ProjectedKV(NamedTuple):
    """The keys and values that the sequences have projected themselves."""

    key: Tensor
    """(own_tokens, heads, head_dim), rows of any stride."""
    value: Tensor
    """As `key`."""
    places: Tensor
    """(own_tokens,) int64: the rows that they are written to."""


Gather = Callable[[Sequence[PageDestination], ProjectedKV, Tensor, Tensor], None]
"""Writes pages, and what is the sequences' own, into key and value, (tokens, heads, head_dim) each, contiguous."""


def gather(placed: Sequence[PageDestination], own: ProjectedKV, key: Tensor, value: Tensor) -> None:
    """See :data:`Gather`; by torch's operations, on any device."""
    key.index_copy_(0, own.places, own.key)
    value.index_copy_(0, own.places, own.value)
    for pages, start in placed:
        for out, rows in zip((key, value), pages.rows(), strict=True):
            out[start : start + len(pages)] = rows.view(-1, *out.shape[1:])
