"""Is Flux slower when it is driven block by block, as other transformers are, than written out?

``python -m giornata_lab.bench.driven`` prints the ratio driven ÷ written out by rows, in full and with a mask. Both are
measured in turns, and their outputs are compared. Decision record 0011 tells why the written-out forward stays.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from giornata.packed.attention import CachedKVRecorder
from giornata.packed.compute_set import BlockInputs, CachedTokens, make_region
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recorders import OwnKeysValues
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.driven_flux import DrivenFlux
from giornata_lab.bench.compute.models import described, transformer_of
from giornata_lab.bench.options import clock_of, opened, shared
from giornata_lab.bench.reporting.report import wait_for, write
from giornata_lab.flags import Several, option, parsed

MASK = 0.11
"""The production trace's mean ratio."""
Step = Callable[[], Tensor]


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=5),
            option("--rows", type=Several(int), default=[1, 3], help="of a step"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/driven.json``."""
    options = options_of(arguments)
    written = opened(options)
    network = DrivenFlux(copy.deepcopy(transformer_of(written)))
    driven = ModelFamily(network.text, written.schedule, network)
    lines = [
        _line(count, masked, driven, written, options) for count in options.rows for masked in (False, True)
    ]
    write("driven", lines, workload={**vars(options), "model": described(written), "mask": MASK})


def _line(
    count: int, masked: bool, driven: ModelFamily, written: ModelFamily, options: SimpleNamespace
) -> dict[str, Any]:
    steps = [_step(of, count, masked, options) for of in (driven, written)]
    off = (steps[0]() - steps[1]()).abs().max()
    clock, times = clock_of(options), list[tuple[float, float]]()
    for _ in range(options.repeats):
        turn = []
        for step in steps:
            began = clock()
            step()
            wait_for(written.device)
            turn.append((clock() - began) * 1e3)
        times.append((turn[0], turn[1]))
    ratios = [one / other for one, other in times]
    return {
        "rows": count,
        "masked": masked,
        "driven ÷ written": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "driven ms": round(statistics.median(one for one, _ in times), 1),
        "written ms": round(statistics.median(other for _, other in times), 1),
        "largest difference": f"{float(off):.1e}",
    }


def _step(of: ModelFamily, count: int, masked: bool, options: SimpleNamespace) -> Step:
    """A forward of so many rows, of different sizes; masked ones take keys and values of a step in full."""
    rows = [_row(of, index, options) for index in range(count)]
    latents, steps, uses = (
        torch.cat([row.latent for row in rows]).to(of.device),
        [0] * count,
        [BlockInputs()] * count,
    )

    def predicted(rows: Sequence[Row], uses: Sequence[BlockInputs]) -> Step:
        with torch.inference_mode():
            assembly = assemble(of, rows)

        @torch.inference_mode()
        def step() -> Tensor:
            return of.network.predict(assembly.batch, latents, assembly.conditioning, steps, uses=uses)

        return step

    if masked:
        rows = [replace(row, region=_region(row)) for row in rows]
        kept = [
            OwnKeysValues(row.region.outside, row.own_tokens[0]) for row in rows if row.region is not None
        ]
        predicted(
            [replace(row, region=None) for row in rows],
            [BlockInputs(recorder=CachedKVRecorder(one)) for one in kept],
        )()
        uses = [BlockInputs(CachedTokens((BlockMode.KV,) * of.depth, one)) for one in kept]
    step = predicted(rows, uses)
    step()
    return step


def _row(of: ModelFamily, index: int, options: SimpleNamespace) -> Row:
    side = isqrt(options.tokens)
    grid = side, max(2, side - 2 * index)
    generator = torch.Generator().manual_seed(options.seed + index)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    cells = grid[0] * grid[1]
    return build_row(
        of,
        RowKey("bench", 0, index),
        grid=grid,
        track=of.schedule.track(sampler=of.schedule.default_sampler, steps=4, strength=1.0, cells=cells),
        text={name: random(*shape) for name, shape in text_shapes(of, options.text).items()},
        conditioning={name: random(cells, width) for name, width in of.network.conditioning.items()},
        guidance_scale=3.5,
    )


def _region(row: Row) -> Any:
    touched = torch.zeros(row.grid, dtype=torch.bool)
    height, width = (max(1, round(side * MASK**0.5)) for side in row.grid)
    touched[:height, :width] = True
    return make_region(touched)


if __name__ == "__main__":
    main()
