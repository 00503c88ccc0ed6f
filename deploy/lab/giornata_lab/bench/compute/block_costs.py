"""What each block takes in each mode, from traces of steps; what the planner is given."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from giornata.packed.compute_set import BlockInputs, CachedTokens
from giornata.packed.packing import TraceLane
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.trace import Trace
from giornata_lab.bench.reporting.report import wait_for


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one row's step."""

    blocks: dict[BlockMode, tuple[float, ...]]
    """By mode, of every block; all that it takes is on the device."""
    around_ms: float
    """What a step takes besides its blocks."""

    def mean_ms(self, mode: BlockMode) -> float:
        """Mean time of a block in `mode`."""
        return statistics.mean(self.blocks[mode])


def measured(family: ModelFamily, row: Row, slabs: Slabs, repeats: int) -> Costs:
    """Medians of `repeats` steps of each mode, in turns, after one that warms up, from their traces."""
    assembly = assemble(family, [row])
    blocks: dict[BlockMode, list[list[float]]] = {mode: [] for mode in BlockMode}
    around: list[float] = []
    for turn in range(repeats + 1):
        for mode in BlockMode:
            trace = Trace(family.device)
            with trace.span(TraceLane.STEP, "step"):
                use = BlockInputs(CachedTokens((mode,) * family.depth, slabs))
                denoise_step(family, assembly, [row], [use], trace)
            wait_for(family.device)
            spans = trace.spans()
            times = [(span[3] - span[2]) * 1e3 for span in spans if span[0] is TraceLane.COMPUTE]
            (step_ms,) = [(span[3] - span[2]) * 1e3 for span in spans if span[0] is TraceLane.STEP]
            if turn:
                blocks[mode].append(times)
                around.append(step_ms - sum(times))
    return Costs(
        {mode: tuple(map(statistics.median, zip(*runs, strict=True))) for mode, runs in blocks.items()},
        max(0.0, statistics.median(around)),
    )
