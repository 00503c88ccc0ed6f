"""The engine alone, in this process: how long it takes to decide on a step, and to put a batch together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch

from giornata.packed.compute_set import make_region
from giornata.planning.step_costs import StepCosts
from giornata.scheduling.batch import Capacity, RowKey
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.batch_tensors import BatchTensors, assemble
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_plan import StepPlan
from giornata_denoiser.families.flux import FluxBatch
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.loading_engine import Known
from giornata_lab.bench.compute.masks import grown
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.bench.compute.workload import PERCENTILES
from giornata_lab.bench.reporting.report import Measurement, measured
from giornata_lab.loadgen.workload import at_percentile

GRIDS = ((32, 32), (24, 32), (32, 24), (16, 32), (32, 16), (24, 24), (28, 20), (20, 28))
"""Token grids of the eight rows: pictures of 256 to 512 pixels a side."""
TEXT_TOKENS = 48
REPEATS = 12
WARM_UP = 2
LAYOUT_REPEATS = 60
STEPS = 4
MASKED_STEPS = 2 * DEFAULT.levels
"""Steps of edits that reuse: every entry serves two of them."""
COSTS: Final = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0), (0.0, 5e-4))
"""Loading takes about as long as computing, so that the planner has to choose."""


def opened(model: Path) -> Checkpoint:
    """The model in a folder."""
    return load(model, dtype=torch.float32, device=torch.device("cpu"))


def bookkeeping_times(checkpoint: Checkpoint, seed: int) -> dict[str, Measurement]:
    """Milliseconds of what eight masked rows cost in a step beside assembly and computing, when they join and later.

    Admission, the modes of their blocks, the slabs that they share and the order of the loads: :meth:`Engine.plan`, and
    the engine's sources. The loader's thread runs beside it, as it does in a denoiser.
    """
    rows = [_reusing(checkpoint, index, seed) for index in range(len(GRIDS))]
    changed: list[float] = []
    unchanged: list[float] = []
    for repeat in range(REPEATS):
        with engines.engine_with(checkpoint.family, model=Known(COSTS)) as engine:
            engine.batch.submit(rows)
            for step in range(MASKED_STEPS):
                took_ms = _bookkeeping_ms(engine)
                if repeat >= WARM_UP:
                    (unchanged if step else changed).append(took_ms)
    return {"batch changed": measured(changed), "batch unchanged": measured(unchanged)}


def _bookkeeping_ms(engine: Engine) -> float:
    """Time of the bookkeeping of one step, which is computed too."""
    sources = engine.computing.sources
    decide = sources.step
    took_s = 0.0

    def timed(rows: Sequence[Row]) -> StepPlan:
        nonlocal took_s
        began = time.perf_counter()
        plan = decide(rows)
        took_s += time.perf_counter() - began
        return plan

    began = time.perf_counter()
    rows = engine.plan()
    took_s += time.perf_counter() - began
    with patch.object(sources, "step", timed):
        report = engine.computing.compute(rows)
    if report.failed:
        raise report.failed[0].error
    engine.settle(report)
    return took_s * 1e3


def assembly_times(checkpoint: Checkpoint, seed: int) -> dict[str, Measurement]:
    """Milliseconds of assembly when rows join or leave, and in the steps between; in full and masked."""
    changed: list[float] = []
    unchanged: list[float] = []
    for repeat in range(REPEATS):
        engine = Engine(checkpoint.family, Capacity(rows=8, tokens=1 << 20), time.perf_counter)
        engine.batch.submit([_row(checkpoint, i, repeat, seed) for i in range(len(GRIDS))])
        while (report := engine.step()) is not None:
            if report.sample is None or repeat < WARM_UP:
                continue
            joined = all(row.step == 1 for row in report.advanced)
            (changed if joined else unchanged).append(report.sample.assemble_ms)
    return {
        "batch changed": measured(changed),
        "batch unchanged": measured(unchanged),
        **_masked_times(checkpoint, seed),
    }


def _masked_times(checkpoint: Checkpoint, seed: int) -> dict[str, Measurement]:
    """Likewise of masked rows: the assembly, and the layouts of the live tokens that the first forward asks for.

    In the steps between, the assembly is kept (measured above) and every block looks its layout up.
    """
    family = checkpoint.family
    rows = [_masked(_row(checkpoint, i, 0, seed), i) for i in range(len(GRIDS))]
    first: list[float] = []
    steady: list[float] = []
    for _ in range(LAYOUT_REPEATS):
        began = time.perf_counter()
        assembly = assemble(family, rows)
        _layouts(assembly, 1)
        made = time.perf_counter()
        _layouts(assembly, family.depth)
        first.append((made - began) * 1e3)
        steady.append((time.perf_counter() - made) * 1e3)
    warm = LAYOUT_REPEATS // 6
    return {
        "masked, batch changed": measured(first[warm:]),
        "masked, layouts of a step, batch unchanged": measured(steady[warm:]),
    }


def _layouts(assembly: BatchTensors, blocks: int) -> None:
    """What the blocks of a forward ask for: everything where tokens enter, regions alone, and what lies outside."""
    if not isinstance(assembly.batch, FluxBatch):
        raise TypeError(f"expected a batch of Flux, received {type(assembly.batch).__name__}")
    sequences = assembly.batch.sequences
    count = len(sequences.regions)
    for _ in range(blocks):
        sequences.live((True,) * count)
        sequences.live((False,) * count)
        sequences.beyond(tuple(range(count)))


def _reusing(checkpoint: Checkpoint, index: int, seed: int) -> Row:
    """A masked row with a template of its own, in the benchmarks' setting."""
    recorded = _row(checkpoint, index, 0, seed, steps=DEFAULT.levels)
    recording = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
    with engines.engine_with(checkpoint.family) as engine:
        (done,) = engines.drained(engine, [replace(recorded, records=recording)])
    template = CachedTemplate(f"template{index}", done.grid, done.entries)
    row = _masked(_row(checkpoint, index, 0, seed, steps=MASKED_STEPS), index)
    return replace(row, template=template)


def _masked(row: Row, index: int) -> Row:
    """`row` with a square mask in its corner, of the production trace's ratio at its share of the batch."""
    height, width = row.grid
    side = max(1, round((height * width * at_percentile(PERCENTILES, (index + 0.5) / len(GRIDS))) ** 0.5))
    touched = torch.zeros(row.grid, dtype=torch.bool)
    touched[:side, :side] = True
    return replace(row, region=make_region(grown(touched, DEFAULT.halo)))


def _row(checkpoint: Checkpoint, index: int, repeat: int, seed: int, steps: int = STEPS) -> Row:
    """A row of noise; its values do not matter, its shapes do."""
    generator = torch.Generator().manual_seed(seed + index)
    height, width = GRIDS[index]
    conditioning = {
        name: torch.randn(height * width, channels, generator=generator)
        for name, channels in checkpoint.family.network.conditioning.items()
    }
    return build_row(
        checkpoint.family,
        RowKey(f"job{repeat}", 1, index),
        grid=(height, width),
        track=checkpoint.family.schedule.track(
            sampler=checkpoint.family.schedule.default_sampler,
            steps=steps,
            strength=1.0,
            cells=height * width,
        ),
        text={
            name: torch.randn(*shape, generator=generator)
            for name, shape in text_shapes(checkpoint.family, TEXT_TOKENS).items()
        },
        conditioning=conditioning,
        guidance_scale=30.0,
    )
