"""A picture's time where loading is slow: the exact planner beside greedy and strawman loading.

The loader is throttled so that loading a block's keys and values takes so many times what the block takes with them, as
in figure 9 of FlashPS. Systems: `exact`, `greedy` (the paper's Algorithm 1), `strawman` (every block from the cache,
loaded ahead) and `full` (no reuse). The engine plans at every step, with one set of weights for all blocks; planning is
part of the picture's time, and every step has its own entry. What was predicted stands beside what it took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import click
import torch

from giornata.packed.packing import BlockInputs, CachedTokens, TraceLane
from giornata.planning.operations import NetworkOperations, SequenceShape, StepCosts, step_work
from giornata.planning.plans import BatchPlanner, greedy_modes, plan_batch, plan_each_alone, uniform_modes
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.recorders import EntryRecorder
from giornata_denoiser.engine.slabs import Device, Slabs
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Entry
from giornata_denoiser.trace import Trace
from giornata_lab.bench.compute.engines import DEFAULT, BenchSetting, Known, engine_with
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows, changed
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.harness import compared, wait_for, write
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.flags import Several, option, parsed

PLANNERS: Final[dict[str, BatchPlanner]] = {
    "strawman": plan_each_alone(uniform_modes(BlockMode.KV)),
    "greedy": plan_each_alone(greedy_modes),
    "full": plan_each_alone(uniform_modes(BlockMode.FULL)),
    "exact": plan_batch,
}
BEST: Final = "exact"
UNCORRECTED: Final = BenchSetting(corrected=False)
"""Every step loads: none is computed in full first."""


@dataclass(frozen=True, eq=False)
class LoadingScene:
    """One picture's row and what it may take, a step an entry."""

    rows: Rows
    row: Row
    entries: tuple[Entry, ...]
    every_form: Entry
    """Of the first step, with all that a template can keep: what a block takes in each mode is measured with it."""
    device: Device
    """Keeps nothing, so that every picture loads all that it takes."""

    def slabs(self) -> Slabs:
        """Those of every form, of which nothing is loaded yet."""
        region = self.row.region
        if region is None:
            raise SystemExit("the mask leaves nothing to be reused; ask for a smaller one")
        return Slabs(self.every_form, region, self.row.own_tokens[0], self.rows.family, device=self.device)


class BlockCosts(NamedTuple):
    """Milliseconds of one row's step; all that a block takes is on the device."""

    block_ms: Mapping[BlockMode, float]
    """Mean of the blocks' times by mode."""
    around_ms: float
    """What a step takes besides its blocks."""


def block_costs(scene: LoadingScene, repeats: int) -> BlockCosts:
    """From medians of `repeats` steps of each mode, in turns, after one that warms up, by their traces."""
    family, slabs = scene.rows.family, scene.slabs()
    for block in range(family.depth):
        slabs.keys_values(block)
        slabs.hidden(block)
    assembly = assemble(family, [scene.row])
    blocks: dict[BlockMode, list[list[float]]] = {mode: [] for mode in BlockMode}
    around: list[float] = []
    for turn in range(repeats + 1):
        for mode in BlockMode:
            trace = Trace(family.device)
            with trace.span(TraceLane.STEP, "step"):
                use = BlockInputs(CachedTokens((mode,) * family.depth, slabs))
                denoise_step(family, assembly, [scene.row], [use], trace)
            wait_for(family.device)
            spans = trace.spans()
            times = [(span[3] - span[2]) * 1e3 for span in spans if span[0] is TraceLane.COMPUTE]
            (step_ms,) = [(span[3] - span[2]) * 1e3 for span in spans if span[0] is TraceLane.STEP]
            if turn:
                blocks[mode].append(times)
                around.append(step_ms - sum(times))
    medians = {
        mode: [statistics.median(of) for of in zip(*runs, strict=True)] for mode, runs in blocks.items()
    }
    means = {mode: statistics.mean(of_blocks) for mode, of_blocks in medians.items()}
    return BlockCosts(means, max(0.0, statistics.median(around)))


def linear(
    costs: BlockCosts, operations: NetworkOperations, shapes: Sequence[SequenceShape], rate_bytes_s: float
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
    full_ms, hidden_ms, kv_ms = (blocks * costs.block_ms[mode] for mode in BlockMode)
    linear_ms = (hidden_ms - kv_ms) / (hidden.linear - kv.linear)
    attention_ms = (full_ms - kv_ms - linear_ms * (full.linear - kv.linear)) / (full.attention - kv.attention)
    sequence_ms = (kv_ms - linear_ms * kv.linear - attention_ms * kv.attention) / kv.sequences
    compute = (costs.around_ms, sequence_ms, linear_ms, attention_ms, 0.0, 0.0)
    return StepCosts(compute, (0.0, 1e3 / rate_bytes_s))


def picture_ms(
    scene: LoadingScene, planner: BatchPlanner, costs: StepCosts, rate_bytes_s: float
) -> tuple[float, float]:
    """What all steps of the picture took, planning included, and the sum of what the engine said of them.

    Args:
        scene: of what.
        planner: that the engine asks at every step.
        costs: that it plans with.
        rate_bytes_s: of its loader.
    """
    row = changed(scene.row, template=CachedTemplate("loading", scene.row.grid, scene.entries))
    predicted_ms, family = 0.0, scene.rows.family
    how: dict[str, Any] = {"planner": planner, "rate_bytes_s": rate_bytes_s, "model": Known(costs)}
    with engine_with(family, setting=UNCORRECTED, **how) as engine:
        began = ended = time.perf_counter()
        engine.batch.submit([row])
        while (report := engine.step()) is not None:
            if report.failed:
                raise report.failed[0].error
            predicted_ms += report.sample.predicted_ms if report.sample else 0.0
            wait_for(family.device)
            ended = time.perf_counter()
    return (ended - began) * 1e3, predicted_ms


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/loading.json``."""
    forms = [str(form) for form in CacheForm]
    options = parsed(
        __doc__,
        [
            *shared(tokens=576, text=72, repeats=3),
            option("--steps", type=int, default=3, help="of the picture"),
            option("--mask", type=float, default=0.11, help="ratio; by default the production trace's mean"),
            option("--loads", type=Several(float), default=[4.2, 2.0, 1.0, 0.5], help="÷ time with cache"),
            option("--forms", type=Several(click.Choice(forms)), default=forms, help="what templates keep"),
        ],
        arguments,
    )
    scene = _scene(rows_of(options), options)
    lines: list[dict[str, Any]] = []
    block_ms: dict[float, dict[str, float]] = {}
    for load in options.loads:  # costs anew each time: machines grow warm
        costs = block_costs(scene, options.repeats)
        block_ms[load] = {str(mode): round(ms, 3) for mode, ms in costs.block_ms.items()}
        lines += _compared(scene, costs, load, options.repeats)
    workload = {
        **vars(options),
        "model": described(scene.rows.family),
        "bits": DEFAULT.bits,
        "halo": DEFAULT.halo,
        "block_ms": block_ms,
    }
    write("loading", lines, workload=workload)


def _scene(rows: Rows, options: SimpleNamespace) -> LoadingScene:
    """A masked row, and the entries of a run of its template over its own noise levels."""
    edit = WorkloadEdit(0, 0, options.mask, 0.5, 0.5, options.steps)
    row = rows.row(replace(edit, ratio=1.0), reuse=False)
    kept, every = (
        RecordingSpec(frozenset(forms), DEFAULT.bits) for forms in (map(CacheForm, options.forms), CacheForm)
    )
    _, every_form = _recorded(rows, row, every)
    entries = []
    for _ in range(options.steps):
        row, entry = _recorded(rows, row, kept)
        entries.append(entry)
    return LoadingScene(
        rows, rows.masked(edit), tuple(entries), every_form, device_for(rows.family.device, 0)
    )


def _recorded(rows: Rows, row: Row, recording: RecordingSpec) -> tuple[Row, Entry]:
    """The row after a step in full, and what was kept of the step."""
    recorder = EntryRecorder(row.level, rows.family.depth, recording)
    use = BlockInputs(recorder=recorder)
    (made,) = denoise_step(rows.family, assemble(rows.family, [row]), [row], [use])
    return row.advanced(made.latent), recorder.entry()


def _compared(scene: LoadingScene, costs: BlockCosts, load: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Every system at one speed of loading; they take turns, and the first turn warms up."""
    size = scene.slabs().load_bytes(0, BlockMode.KV)
    rate = size / (load * costs.block_ms[BlockMode.KV] / 1e3)
    weights = linear(costs, scene.rows.family.operations, scene.row.shapes, rate)
    took: dict[str, list[float]] = {name: [] for name in PLANNERS}
    said: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for turn in range(repeats + 1):
        for name, planner in PLANNERS.items():
            ms, predicted = picture_ms(scene, planner, weights, rate)
            if turn:
                took[name].append(ms)
                said[name].append(predicted)
    for name in PLANNERS:
        ms, predicted = statistics.median(took[name]), statistics.median(said[name])
        yield {
            "load": load,
            "loading": name,
            **compared("÷ exact", took[name], took[BEST]),
            "picture ms": round(ms, 1),
            "predicted ms": round(predicted, 1),
            "off by": f"{ms / predicted - 1:+.1%}",
        }


if __name__ == "__main__":
    main()
