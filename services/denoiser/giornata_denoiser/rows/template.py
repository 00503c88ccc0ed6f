"""What a template run begins with and leaves behind: entries by noise level, each with what its blocks kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.region import Region
from giornata.wire.blocks import PARTS
from giornata.wire.values import BlockMode
from giornata_denoiser.rows.stored import StoredTensor, pinned

FILE_BYTES: Final = 512
"""Most that a template's file takes for one tensor of a block beside its bytes."""


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """What one block kept at one noise level: all, one form, or nothing."""

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
        copies = dict(zip(own, pinned(list(own.values())), strict=True))
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
        """Whether every value of it is."""
        return all(part.finite for entry in self.entries for block in entry.blocks for part in block.parts)

    def noise_beside(self, own: Tensor, where: Region) -> Tensor:
        """A row's noise that takes from it: its `own` (tokens, channels) in its region, the recorded outside."""
        recorded = template_noise(*own.shape) if self.noise is None else self.noise
        noise = recorded.to(own.device, own.dtype, copy=True)
        noise[where.computed] = own[where.computed]
        return noise

    def pinned(self) -> CachedTemplate:
        """The same in pinned host memory; see :meth:`giornata_denoiser.rows.stored.StoredTensor.pinned`."""
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
