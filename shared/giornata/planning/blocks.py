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
    """Of the outside tokens' input; 0 where it is on the device already."""
    kv_slabs: int
    """Of their keys and values; 0 likewise."""
    fresh: bool = False
    """A step's first block: the outside tokens' hidden state is at hand whatever was before."""
    others_ms: float = 0.0
    """What other rows of the batch add to this block, whatever this one does."""
    others_slabs: int = 0
    """What this block waits for on their account."""
    hidden_kept: bool = True
    """Whether there is a hidden state to be loaded at all."""
    kv_kept: bool = True
    """Likewise keys and values."""

    def compute_ms(self, mode: Mode, *, live: bool) -> float:
        """Of this row and the others; infinite for a mode that needs what is neither at hand (`live`) nor kept."""
        if mode is Mode.KV:
            return self.others_ms + self.kv_ms if self.kv_kept else math.inf
        if not (live or self.fresh or self.hidden_kept):
            return math.inf
        return self.others_ms + (self.full_ms if mode is Mode.FULL else self.hidden_ms)

    def slabs(self, mode: Mode, *, live: bool) -> int:
        """What this row has to load, `live` telling whether the outside tokens' hidden state is at hand."""
        if mode is Mode.KV:
            return self.kv_slabs
        return 0 if live or self.fresh else self.hidden_slabs


@dataclass(frozen=True)
class Link:
    """The way over which the loader moves slabs, one after the other, in the order of the blocks."""

    slab_ms: float
    busy_ms: float = 0.0
    """From now until it is free for this plan's first slab."""


@dataclass(frozen=True)
class Timeline:
    """When each block of a plan begins and ends, and when what it waited for was there. All from now."""

    loaded_ms: tuple[float, ...]
    """0 for a block that loads nothing."""
    began_ms: tuple[float, ...]
    ended_ms: tuple[float, ...]
    slabs: int
    """Loaded in total."""

    @property
    def finish_ms(self) -> float:
        """End of the last block."""
        return self.ended_ms[-1] if self.ended_ms else 0.0

    @property
    def possible(self) -> bool:
        """Whether every block finds what its mode takes."""
        return math.isfinite(self.finish_ms)

    @property
    def waits(self) -> bool:
        """Whether a block begins later than the one before has ended."""
        return any(began > ended for began, ended in zip(self.began_ms, (0.0, *self.ended_ms), strict=False))


def timeline(blocks: Sequence[Block], modes: Sequence[Mode], link: Link) -> Timeline:
    """Run `modes`: a block begins when the one before has ended and all of its slabs are there.

    Raises:
        ValueError: not one mode a block.
    """
    if len(blocks) != len(modes):
        raise ValueError(f"received {len(modes)} modes for {len(blocks)} blocks")
    loaded, began, ended = [], [], []
    slabs, now, live = 0, 0.0, False
    for block, mode in zip(blocks, modes, strict=True):
        needed = block.slabs(mode, live=live) + block.others_slabs
        slabs += needed
        there = link.busy_ms + slabs * link.slab_ms if needed else 0.0
        begin = max(now, there)
        now = begin + block.compute_ms(mode, live=live)
        live = mode is Mode.FULL
        loaded.append(there)
        began.append(begin)
        ended.append(now)
    return Timeline(tuple(loaded), tuple(began), tuple(ended), slabs)


def sequential(blocks: Sequence[Block], modes: Sequence[Mode], link: Link) -> float:
    """When `modes` end if all is loaded before anything is computed: FlashPS's naive loading (figure 9), in ms."""
    run = timeline(blocks, modes, link)
    computing = timeline(blocks, modes, Link(0.0)).finish_ms
    return (link.busy_ms + run.slabs * link.slab_ms if run.slabs else 0.0) + computing
