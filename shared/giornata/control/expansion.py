"""Which sample of a Flux ControlNet is added behind which block. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Numbers of double and single blocks, of a network; or of the samples for each, of a ControlNet."""

    double: int
    single: int

    @property
    def all(self) -> int:
        """Of both kinds."""
        return self.double + self.single


def sample_of(block: int, base: Blocks, samples: Blocks, *, repeats: bool = False) -> int | None:
    """The sample that is added behind a block of the `base`, double blocks first in both; None for nothing.

    As `FluxTransformer2DModel.forward` has it: so many neighbouring blocks share a sample that all samples serve; for
    `repeats` (XLabs' ControlNets, with an `input_hint_block`) double blocks take them in turns.
    """
    if block < base.double:
        if not samples.double:
            return None
        return block % samples.double if repeats else block // _interval(base.double, samples.double)
    if not samples.single:
        return None
    return samples.double + (block - base.double) // _interval(base.single, samples.single)


def _interval(blocks: int, samples: int) -> int:
    return -(-blocks // samples)
