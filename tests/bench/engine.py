"""The engine alone, in this process: how long it takes to put a batch together."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from giornata_denoiser.assembly import Assembly, assemble
from giornata_denoiser.batch import Capacity, RowKey
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine import Engine
from giornata_denoiser.reuse.region import region
from giornata_denoiser.row import Row, build_row
from giornata_denoiser.sigmas import sigma_grid
from tests.bench.report import Measured, measured
from tests.bench.setting import DEFAULT
from tests.bench.workload import PERCENTILES, at_percentile

GRIDS = ((32, 32), (24, 32), (32, 24), (16, 32), (32, 16), (24, 24), (28, 20), (20, 28))
"""Token grids of the eight rows: pictures of 256 to 512 pixels a side."""
TEXT_TOKENS = 48
REPEATS = 12
LAYOUT_REPEATS = 60


def assembly_times(model: Path, seed: int) -> dict[str, Measured]:
    """Milliseconds of assembly when rows join or leave, and in the steps between; in full and masked."""
    checkpoint = load(model, dtype=torch.float32, device=torch.device("cpu"))
    changed: list[float] = []
    unchanged: list[float] = []
    for repeat in range(REPEATS):
        engine = Engine(checkpoint.family, Capacity(rows=8, tokens=1 << 20), time.perf_counter)
        engine.batch.submit([_row(checkpoint, i, repeat, seed) for i in range(len(GRIDS))])
        while (report := engine.step()) is not None:
            if report.sample is None or repeat < 2:
                continue
            joined = all(row.step == 1 for row in report.advanced)
            (changed if joined else unchanged).append(report.sample.assemble_ms)
    return {
        "batch changed": measured(changed),
        "batch unchanged": measured(unchanged),
        **_masked_times(checkpoint, seed),
    }


def _masked_times(checkpoint: Checkpoint, seed: int) -> dict[str, Measured]:
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
        _layouts(assembly, family.blocks)
        first.append((made - began) * 1e3)
        steady.append((time.perf_counter() - made) * 1e3)
    warm = LAYOUT_REPEATS // 6
    return {
        "masked, batch changed": measured(first[warm:]),
        "masked, layouts of a step, batch unchanged": measured(steady[warm:]),
    }


def _layouts(assembly: Assembly, blocks: int) -> None:
    """What the blocks of a forward ask for: everything where tokens enter, regions alone, and what lies outside."""
    sequences = assembly.sequences
    count = sequences.layout.sequences
    for _ in range(blocks):
        sequences.live((True,) * count)
        sequences.live((False,) * count)
        sequences.beyond(range(count))


def _masked(row: Row, index: int) -> Row:
    """`row` with a square mask in its corner, of the production trace's ratio at its share of the batch."""
    height, width = row.grid
    side = max(1, round((height * width * at_percentile(PERCENTILES, (index + 0.5) / len(GRIDS))) ** 0.5))
    touched = torch.zeros(row.grid, dtype=torch.bool)
    touched[:side, :side] = True
    return replace(row, region=region(touched, DEFAULT.halo))


def _row(checkpoint: Checkpoint, index: int, repeat: int, seed: int) -> Row:
    """A row of noise; its values do not matter, its shapes do."""
    generator = torch.Generator().manual_seed(seed + index)
    height, width = GRIDS[index]
    joint_dim, pooled_dim = checkpoint.family.prompt_channels
    conditioning = {
        name: torch.randn(height * width, channels, generator=generator)
        for name, channels in checkpoint.family.conditioning.items()
    }
    return build_row(
        checkpoint.family,
        RowKey(f"job{repeat}", 1, index),
        grid=(height, width),
        sigmas=sigma_grid(checkpoint.scheduler, steps=4, strength=1.0, image_tokens=height * width),
        text={
            "prompt_embeds": torch.randn(TEXT_TOKENS, joint_dim, generator=generator),
            "pooled_prompt_embeds": torch.randn(pooled_dim, generator=generator),
        },
        conditioning=conditioning,
        guidance_scale=30.0,
    )
