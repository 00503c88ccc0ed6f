"""Which tokens the blocks of one forward compute, and what the others are where they are needed.

A stream is (tokens, ...): tokens of any shape, in the order of :mod:`giornata.packed.packing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from giornata.packed.packing import Layout
from giornata.packed.region import ComputeSet, PackedBatch
from giornata.packed.uses import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode

LAST = -1
"""No block: behind the last one."""


class ComputeSetStream:
    """The image stream's live tokens, from block to block.

    Text is live in every block. A sequence that takes something computes its region alone, but for blocks in
    `Mode.FULL`.
    """

    def __init__(self, sequences: PackedBatch, uses: Sequence[BlockInputs]) -> None:
        self._sequences = sequences
        self.taken = {s: use.taken for s, use in enumerate(uses) if use.taken is not None}
        self.recorders = {s: use.recorder for s, use in enumerate(uses) if use.recorder is not None}
        self._residuals = {s: use.residuals for s, use in enumerate(uses) if use.residuals is not None}
        self.hidden: dict[int, Tensor] = {}
        """By sequence: the present block's input of the outside tokens, (outside, ...), where it is needed."""
        # A first block that needs the hidden state of outside tokens makes it from their latents.
        self.now = self._where(lambda taken: taken.modes[0] is not BlockMode.KV)

    def enter(self, block: int, image: Tensor) -> Tensor:
        """The image stream as `block` computes it, (live_tokens, ...); recorders see it."""
        if not self.taken and not self.recorders:
            return image
        spans = self.now.layout.image.bounds
        self.hidden = {
            sequence: self._outside_of(image[slice(*spans[sequence])], sequence, block)
            for sequence, taken in self.taken.items()
            if taken.modes[block] is BlockMode.HIDDEN
        }
        image = self._converted(image, self._in(block), block)
        spans = self.now.layout.image.bounds
        for sequence, recorder in self.recorders.items():
            recorder.hidden(block, image[slice(*spans[sequence])].flatten(1))
        return image

    def enter_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`enter` for the joint order."""
        needed = any(taken.modes[block] is BlockMode.HIDDEN for taken in self.taken.values())
        if not self.recorders and not needed and self._in(block) is self.now:
            self.hidden = {}
            return joint
        text, image = self.now.layout.split(joint)
        image = self.enter(block, image)
        return self.now.layout.join(text, image)

    def add(self, block: int, image: Tensor) -> Tensor:
        """The image stream behind `block`, (live_tokens, channels), with what ControlNets add to it, in place."""
        return self._added(block, image, self.now.layout.image.bounds)

    def add_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`add` for the joint order."""
        return self._added(block, joint, _pictures(self.now.layout)) if self._residuals else joint

    def leave(self, image: Tensor) -> Tensor:
        """The regions' tokens of the image stream behind the last block."""
        return self._converted(image, self._sequences.live((False,) * len(self._sequences.regions)), LAST)

    def _added(self, block: int, stream: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """`stream`, in which the live tokens of each sequence's picture lie at `spans`."""
        for sequence, residuals in self._residuals.items():
            sample, region = residuals.sample(block), self._sequences.regions[sequence]
            if sample is None:
                continue
            part = stream[slice(*spans[sequence])]
            if residuals.whole and self.now.whole[sequence]:
                part[: len(sample)].add_(sample)  # companions lie behind the picture's tokens
            elif region is None:
                raise ValueError(f"sequence {sequence} has no region, and a residual of one")
            elif residuals.whole:
                part += sample.index_select(0, region.computed)
            elif self.now.whole[sequence]:
                part.index_add_(0, region.computed, sample)
            else:
                part += sample
        return stream

    def _in(self, block: int) -> ComputeSet:
        return self._where(lambda taken: taken.modes[block] is BlockMode.FULL)

    def _where(self, whole: Callable[[CachedTokens], bool]) -> ComputeSet:
        count = len(self._sequences.regions)
        return self._sequences.live(tuple(s not in self.taken or whole(self.taken[s]) for s in range(count)))

    def _outside_of(self, image: Tensor, sequence: int, block: int) -> Tensor:
        """The input of `block` at the outside tokens; `image` is what is live of the sequence."""
        region = self._sequences.regions[sequence]
        if region is None or not self.now.whole[sequence]:
            return self._kept(sequence, block, image)
        return image.index_select(0, region.outside)

    def _kept(self, sequence: int, block: int, like: Tensor) -> Tensor:
        """The outside tokens as the template had them, of the shape of the tokens `like`."""
        kept = self.taken[sequence].source.hidden(block)
        return kept.view(len(kept), *like.shape[1:])

    def _converted(self, image: Tensor, wanted: ComputeSet, block: int) -> Tensor:
        """The image stream with the tokens of `wanted`, which are live from now on.

        Tokens that join are those of the input of `block`, as the template had them.
        """
        before, self.now = self.now, wanted
        if before is wanted:
            return image
        parts = list(torch.split(image, list(before.layout.image.lengths)))
        for sequence, region in enumerate(self._sequences.regions):
            had, want = before.whole[sequence], wanted.whole[sequence]
            if region is None or had == want:
                continue
            part = parts[sequence]
            if had:
                parts[sequence] = part.index_select(0, region.computed)
            else:
                whole = part.new_empty(len(region.computed) + len(region.outside), *part.shape[1:])
                whole[region.computed] = part
                whole[region.outside] = self._kept(sequence, block, part)
                parts[sequence] = whole
        return torch.cat(parts)


def _pictures(layout: Layout) -> list[tuple[int, int]]:
    """(start, end) of each sequence's image tokens in the joint order."""
    spans = zip(layout.joint.bounds, layout.text.lengths, strict=True)
    return [(start + text, end) for (start, end), text in spans]
