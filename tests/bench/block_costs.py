"""What each block takes in each mode, by stamps at the blocks' entries; what the planner is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from giornata.planning.blocks import Mode
from giornata_denoiser.assembly import assemble
from giornata_denoiser.families.flux_forward import FluxForward
from giornata_denoiser.families.flux_inpaint import FluxInpaint
from giornata_denoiser.families.sequences import Sequences
from giornata_denoiser.reuse.slabs import Slabs
from giornata_denoiser.reuse.uses import Reuse, Use
from giornata_denoiser.row import Row
from giornata_denoiser.stepping import denoise_step
from tests.bench.options import wait_for


class _Stamped(FluxForward):
    """Stamps when each block is entered, and the end."""

    def __init__(self, stamps: dict[int, float], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stamps = stamps

    def _stamp(self, block: int) -> None:
        if block not in self._stamps:
            wait_for(self._conditioning.device)
            self._stamps[block] = time.perf_counter()

    def _entering(self, block: int, image: Tensor) -> Tensor:
        self._stamp(block)
        return super()._entering(block, image)

    def _entering_joint(self, block: int, joint: Tensor) -> Tensor:
        self._stamp(block)
        return super()._entering_joint(block, joint)


class _StampedFlux(FluxInpaint):
    """A family whose forwards are stamped."""

    stamps: dict[int, float]

    def velocity(
        self, sequences: Sequences, image: Tensor, timestep: Tensor, uses: Sequence[Use] = ()
    ) -> Tensor:
        conditioning = self._conditioning(sequences, timestep)
        forward = _Stamped(self.stamps, self.transformer, self._attend, sequences, conditioning, uses)
        return forward.run(image)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one row's step."""

    blocks: dict[Mode, tuple[float, ...]]
    """By mode, of every block; all that it takes is on the device."""
    around_ms: float
    """What a step takes besides its blocks."""

    def mean_ms(self, mode: Mode) -> float:
        """Of a block."""
        return statistics.mean(self.blocks[mode])


def measured(family: FluxInpaint, row: Row, slabs: Slabs, repeats: int) -> Costs:
    """Medians of `repeats` steps of each mode, in turns, after one that warms up.

    Blocks of one kind are alike; all of a kind get the same cost.
    """
    stamped = _StampedFlux(family.transformer)
    assembly = assemble(stamped, [row])
    blocks: dict[Mode, list[list[float]]] = {mode: [] for mode in Mode}
    around: list[float] = []
    for turn in range(repeats + 1):
        for mode in Mode:
            stamped.stamps = {}
            began = time.perf_counter()
            denoise_step(stamped, assembly, [row], [Reuse((mode,) * family.blocks, slabs)])
            wait_for(family.device)
            ended = time.perf_counter()
            entered = [stamped.stamps[block] for block in range(family.blocks)]
            times = [(b - a) * 1e3 for a, b in pairwise(entered)]
            if turn:
                blocks[mode].append(times)
                around.append((ended - began) * 1e3 - sum(times) * (1 + 1 / len(times)))
    return Costs(
        {mode: _by_kind(family, runs) for mode, runs in blocks.items()}, max(0.0, statistics.median(around))
    )


def _by_kind(family: FluxInpaint, runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """One cost for the double blocks and one for the single ones, of which the last has no next."""
    double = len(family.transformer.transformer_blocks)
    first = statistics.median(time for run in runs for time in run[: double - 1] or run[:1])
    second = statistics.median(time for run in runs for time in run[double:] or run[-1:])
    return (first,) * double + (second,) * (family.blocks - double)
