"""First-block cache: sequences that leave a forward behind its first block, each by its own rule.

Where the first block adds nearly what it added in the sequence's last whole forward, the blocks behind it are taken to
add what they added then: `FirstBlockCacheConfig` of diffusers, from ParaAttention. Each sequence of a batch decides for
itself, so that those which stay are a batch of their own from the second block on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from giornata.packed.live import LiveTokens
from giornata.packed.uses import Use


@dataclass(frozen=True, eq=False)
class Remembered:
    """What one whole forward added to a sequence's image stream: (computed, channels) each, its region's tokens."""

    first: Tensor
    """By the first block."""
    behind: Tensor
    """By all blocks behind it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of both."""
        return self.first.nbytes + self.behind.nbytes

    def change(self, first: Tensor) -> Tensor:
        """() float32: how far the first block's residual is from this one, by L1 norms relative to this one's."""
        moved = (first - self.first).abs().mean(dtype=torch.float32)
        return moved / self.first.abs().mean(dtype=torch.float32)


class FirstBlockCache:
    """The cache of one sequence in one forward; `last` is None before its first whole one."""

    def __init__(self, threshold: float, last: Remembered | None) -> None:
        self.threshold, self.last = threshold, last
        """It leaves where the relative change is at most the threshold."""
        self.left = False
        """Whether it has left this forward."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it remembers."""
        return 0 if self.last is None else self.last.size_bytes


class FirstBlocks:
    """The caches of one forward's sequences: who leaves, and what becomes of all.

    A sequence that shows something of every block to a recorder stays.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._caches = {s: use.first_block for s, use in enumerate(uses) if use.first_block is not None}
        self._bound = {
            s for s, use in enumerate(uses) if use.recorder is not None or use.padding_recorder is not None
        }
        self._sequences = len(uses)
        self._added: dict[int, Tensor] = {}
        self._behind: dict[int, Tensor] = {}
        """By sequence with a cache: what the first block added, and the stream behind it; the region's tokens."""
        self.staying = tuple(range(self._sequences))
        """The sequences that pass all blocks."""

    def __bool__(self) -> bool:
        return bool(self._caches)

    def decide(self, tokens: LiveTokens, entered: Tensor, image: Tensor) -> tuple[int, ...]:
        """The sequences that stay, from the live tokens of the image stream before and behind the first block."""
        for sequence in self._caches:
            before, behind = (tokens.computed(sequence, stream) for stream in (entered, image))
            self._behind[sequence] = behind.clone()  # what ControlNets add comes in place
            self._added[sequence] = behind - before
        known = {
            sequence: cache.last.change(self._added[sequence])
            for sequence, cache in self._caches.items()
            if cache.last is not None and sequence not in self._bound
        }
        if known:  # one wait for the device
            changes = zip(known, torch.stack(list(known.values())).tolist(), strict=True)
            for sequence, change in changes:
                cache = self._caches[sequence]
                cache.left = change <= cache.threshold
        self.staying = tuple(
            s for s in range(self._sequences) if s not in self._caches or not self._caches[s].left
        )
        return self.staying

    def joined(self, lengths: Sequence[int], image: Tensor) -> Tensor:
        """The regions' tokens of all sequences behind the last block, of those that stayed.

        `image` is (tokens, channels), so many tokens of each that stayed.
        """
        parts = dict(zip(self.staying, torch.split(image, list(lengths)), strict=True))
        for sequence, cache in self._caches.items():
            behind = self._behind[sequence]
            if cache.left and cache.last is not None:
                parts[sequence] = behind + cache.last.behind
            else:
                cache.last = Remembered(self._added[sequence], parts[sequence] - behind)
        return torch.cat([parts[sequence] for sequence in range(self._sequences)])
