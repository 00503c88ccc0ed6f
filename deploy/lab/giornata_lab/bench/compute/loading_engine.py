"""All steps of one picture by the engine itself over the throttled loader: it plans step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from giornata.planning.cost_model import StepCosts
from giornata.planning.operations import NetworkOperations, SequenceShape, StepWork, step_work
from giornata.planning.plans import BatchPlanner, greedy_modes, plan_batch, plan_each_alone, uniform_modes
from giornata.wire.values import BlockMode
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.block_costs import Costs
from giornata_lab.bench.compute.engines import engine_with
from giornata_lab.bench.compute.loading_run import LoadingScene
from giornata_lab.bench.compute.setting import BenchSetting
from giornata_lab.bench.reporting.report import wait_for

PLANNERS: Final[dict[str, BatchPlanner]] = {
    "strawman": plan_each_alone(uniform_modes(BlockMode.KV)),
    "greedy": plan_each_alone(greedy_modes),
    "full": plan_each_alone(uniform_modes(BlockMode.FULL)),
    "exact": plan_batch,
}
UNCORRECTED: Final = BenchSetting(corrected=False)
"""Every step loads: none is computed in full first."""


@dataclass(frozen=True)
class Known:
    """A cost model that was measured before and learns nothing more."""

    costs: StepCosts

    def observe_step(self, work: StepWork, step_ms: float) -> None:
        """Nobody learns from it, so that all systems plan with the same costs."""


class LoadTimes(NamedTuple):
    """One picture."""

    ms: float
    """Planning included."""
    predicted_ms: float
    """The sum of what the engine said of its steps."""


def linear(
    costs: Costs, operations: NetworkOperations, shapes: Sequence[SequenceShape], rate_bytes_s: float
) -> StepCosts:
    """The weights by which the blocks of these sequences take on average what was measured, in each mode.

    What projections take beyond keys and values is linear, what a step in full takes beyond that is attention. What is
    left for a sequence may be below 0, where half the tokens take less than half the time.

    Args:
        costs: of the row, as they were measured.
        operations: of the network.
        shapes: of its sequences.
        rate_bytes_s: of the loader.
    """
    blocks = operations.blocks
    full, hidden, kv = (step_work(operations, shapes, [(mode,) * blocks] * len(shapes)) for mode in BlockMode)
    full_ms, hidden_ms, kv_ms = (blocks * costs.mean_ms(mode) for mode in BlockMode)
    linear_ms = (hidden_ms - kv_ms) / (hidden.linear - kv.linear)
    attention_ms = (full_ms - kv_ms - linear_ms * (full.linear - kv.linear)) / (full.attention - kv.attention)
    sequence_ms = (kv_ms - linear_ms * kv.linear - attention_ms * kv.attention) / kv.sequences
    compute = (costs.around_ms, sequence_ms, linear_ms, attention_ms, 0.0, 0.0)
    return StepCosts(compute, (0.0, 1e3 / rate_bytes_s))


def picture(scene: LoadingScene, planner: BatchPlanner, costs: StepCosts, rate_bytes_s: float) -> LoadTimes:
    """Return what all steps of the picture took, an entry each.

    Args:
        scene: of what.
        planner: that the engine asks at every step.
        costs: that it plans with.
        rate_bytes_s: of its loader.
    """
    template = CachedTemplate("loading", scene.row.grid, scene.entries)
    row = replace(scene.row, template=template)
    predicted_ms = 0.0
    with engine_with(
        scene.rows.family,
        planner=planner,
        rate_bytes_s=rate_bytes_s,
        model=Known(costs),
        setting=UNCORRECTED,
    ) as engine:
        began = ended = time.perf_counter()
        engine.batch.submit([row])
        while (report := engine.step()) is not None:
            if report.failed:
                raise report.failed[0].error
            predicted_ms += report.sample.predicted_ms if report.sample else 0.0
            wait_for(scene.rows.family.device)
            ended = time.perf_counter()
    return LoadTimes((ended - began) * 1e3, predicted_ms)
