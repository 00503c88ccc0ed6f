"""Eight rows of a UNet in one forward beside one after the other: other sizes, masks, prompts and timesteps.

``python -m giornata_lab.bench.unet_rows`` prints the ratio together ÷ one after the other, of masked rows that take
everything outside of their tiles from a recording. Samplers differ behind the forward; ``samplers`` has their time.
"""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import click
import torch

from giornata.packed.compute_set import BlockInputs, Region, make_region
from giornata.runtime import keep_freed
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.tiny_unet import Everything
from giornata_lab.bench.compute.unets import MASKS, SHAPES, network, touched_tiles
from giornata_lab.bench.options import clock_of
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.unet_step import Network, forward, taking
from giornata_lab.flags import Several, option, parsed

ROWS: Final = 8
RATIOS: Final = (0.03, 0.06, 0.11, 0.2)
"""Ratios of the masks, the production trace's."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--shapes", type=Several(click.Choice(list(SHAPES))), default="sd,sdxl"),
            option("--threads", type=int, default=os.cpu_count(), help="of torch"),
            option("--repeats", type=int, default=7),
            option("--processor-time", is_flag=True, help="what this process computed, not the clock"),
            option("--returning", is_flag=True, help="freed memory to the kernel, as glibc does by default"),
        ],
        arguments,
    )


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/unet_rows.json``."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    if not options.returning:
        keep_freed()
    write("unet_rows", [_line(name, options) for name in options.shapes], workload=vars(options))


def _line(name: str, options: SimpleNamespace) -> dict[str, Any]:
    made, side = network(name)
    grids = [(side, side), (side, 3 * side // 4), (3 * side // 4, side), (side // 2, side)]
    recorded = {grid: _recorded(made, grid) for grid in grids}
    mixed = [grids[index % len(grids)] for index in range(ROWS)]
    pictures = [
        tiny_unet.picture(made, grid, words=77, seed=index, step=index % 2)
        for index, grid in enumerate(mixed)
    ]
    where = [_region(index, grid, made.side) for index, grid in enumerate(mixed)]
    uses = [taking(made, recorded[grid], place) for grid, place in zip(mixed, where, strict=True)]
    together = forward(made, pictures, where, uses)
    apart = [
        forward(made, [one], [place], [use]) for one, place, use in zip(pictures, where, uses, strict=True)
    ]
    off = (together() - torch.cat([each() for each in apart])).abs().max()
    times = [
        (_timed(together, options), _timed(lambda: [each() for each in apart], options))
        for _ in range(options.repeats)
    ]
    ratios = [one / other for (one, _), (other, _) in times]
    return {
        "shape": name,
        "together ÷ apart": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "together ms": round(statistics.median(one for (one, _), _ in times)),
        "apart ms": round(statistics.median(other for _, (other, _) in times)),
        "page faults together": round(statistics.median(faults for (_, faults), _ in times)),
        "apart": round(statistics.median(faults for _, (_, faults) in times)),
        "tiles": ", ".join(str(len(place.computed)) for place in where),
        "largest difference": f"{float(off):.1e}",
    }


def _recorded(made: Network, grid: tuple[int, int]) -> Everything:
    everything = Everything()
    forward(made, [tiny_unet.picture(made, grid, words=77)], [None], [BlockInputs(recorder=everything)])()
    return everything


def _region(index: int, grid: tuple[int, int], side: int) -> Region:
    """Every third mask is a strip."""
    mask = MASKS["box" if index % 3 else "strip"](max(grid) * side, RATIOS[3 * index % len(RATIOS)])
    found = make_region(touched_tiles(mask, side)[: grid[0], : grid[1]])
    if found is None:
        raise ValueError(f"the mask of row {index} touches all tiles of {grid} or none")
    return found


def _timed(call: Callable[[], object], options: SimpleNamespace) -> tuple[float, int]:
    """Milliseconds, and pages that were touched first."""
    clock, before = clock_of(options), _faults()
    began = clock()
    call()
    return (clock() - began) * 1e3, _faults() - before


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
