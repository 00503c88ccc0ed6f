"""The compute set: which tokens of a picture an edit computes, and which it takes from a recording. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from giornata.wire.values import CellMap


@dataclass(frozen=True, eq=False)
class Region:
    """A partition of a picture's tokens. Indices are int64, ascending, row-major."""

    computed: Tensor
    """(computed,): the compute set; at least one."""
    outside: Tensor
    """(outside,): all others; at least one."""
    digest: bytes
    """Equal for equal partitions: rows that share one share what they take from a recording."""
    _twins: dict[torch.device, Region] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> Region:
        """The same region with its indices on `device`; copied there once."""
        if self.computed.device == device:
            return self
        if device not in self._twins:
            self._twins[device] = Region(self.computed.to(device), self.outside.to(device), self.digest)
        return self._twins[device]


def region(cells: Tensor) -> Region | None:
    """The region of a compute set, on the CPU; None where there is nothing to gain: it holds every token or none.

    Args:
        cells: (height, width) bool, in tokens.
    """
    flat = cells.cpu().flatten()
    if bool(flat.all()) or not bool(flat.any()):
        return None
    digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()
    return Region(flat.nonzero().squeeze(1), (~flat).nonzero().squeeze(1), digest)


def region_of(cells: CellMap) -> Region | None:
    """:func:`region` of a compute set as an inspection carries it."""
    packed = torch.frombuffer(bytearray(cells.bits), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(7, -1, -1) & 1
    return region(bits.flatten()[: cells.height * cells.width].bool())
