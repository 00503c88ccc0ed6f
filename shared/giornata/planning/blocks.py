"""What a block may do, what it costs, and when a sequence of blocks ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from giornata.wire.values import Mode


@dataclass(frozen=True)
class Block:
    """One block of one step: what each mode takes, and what has to be loaded for it first."""

    full_ms: float
    hidden_ms: float
    kv_ms: float
    hidden_slabs: int
    """Slabs of the outside tokens' input; 0 where it is on the device already."""
    kv_slabs: int
    """Slabs of their keys and values; 0 where these are on the device already."""
    fresh: bool = False
    """It is a step's first block, where the outside tokens' hidden state is always at hand."""
    others_ms: float = 0.0
    """Time that other rows of the batch add to this block."""
    others_slabs: int = 0
    """Slabs of other rows that this block waits for."""
    hidden_kept: bool = True
    """Whether the template keeps a hidden state."""
    kv_kept: bool = True
    """Whether the template keeps keys and values."""

    def compute_ms(self, mode: Mode, *, live: bool) -> float:
        """Time of this row and the others; infinite where the mode needs what is neither at hand (`live`) nor kept."""
        if mode is Mode.KV:
            return self.others_ms + self.kv_ms if self.kv_kept else math.inf
        if not (live or self.fresh or self.hidden_kept):
            return math.inf
        return self.others_ms + (self.full_ms if mode is Mode.FULL else self.hidden_ms)

    def slabs(self, mode: Mode, *, live: bool) -> int:
        """Slabs that this row loads; `live`: the outside tokens' hidden state is at hand."""
        if mode is Mode.KV:
            return self.kv_slabs
        return 0 if live or self.fresh else self.hidden_slabs


@dataclass(frozen=True)
class Link:
    """The path on which the loader moves slabs, one after the other, in the order of the blocks."""

    slab_ms: float
    busy_ms: float = 0.0
    """Time until it is free for this plan's first slab."""


@dataclass(frozen=True)
class Timeline:
    """When the blocks of a plan end, from now; never where a block does not find the entry that its mode takes."""

    ended_ms: tuple[float, ...]
    slabs: int
    waits: bool
    """Whether a block begins later than the one before has ended."""

    @property
    def finish_ms(self) -> float:
        """End of the last block."""
        return self.ended_ms[-1] if self.ended_ms else 0.0


def timeline(blocks: Sequence[Block], modes: Sequence[Mode], link: Link) -> Timeline:
    """Run `modes`: a block begins when the one before has ended and all of its slabs are there.

    Raises:
        ValueError: not one mode a block.
    """
    if len(blocks) != len(modes):
        raise ValueError(f"received {len(modes)} modes for {len(blocks)} blocks")
    ended = []
    slabs, now, live, waits = 0, 0.0, False, False
    for block, mode in zip(blocks, modes, strict=True):
        needed = block.slabs(mode, live=live) + block.others_slabs
        slabs += needed
        there = link.busy_ms + slabs * link.slab_ms if needed else 0.0
        waits = waits or there > now
        now = max(now, there) + block.compute_ms(mode, live=live)
        live = mode is Mode.FULL
        ended.append(now)
    return Timeline(tuple(ended), slabs, waits)


def sequential(blocks: Sequence[Block], modes: Sequence[Mode], link: Link) -> float:
    """When `modes` end, in ms, if everything is loaded before computing begins: FlashPS's naive loading (figure 9)."""
    computing = timeline(blocks, modes, Link(0.0))
    loading_ms = link.busy_ms + computing.slabs * link.slab_ms if computing.slabs else 0.0
    return loading_ms + computing.finish_ms
