"""One forward of a UNet over the tiles of a mask beside one over the whole picture, and several rows in one forward.

``python -m giornata_lab.bench.unet_step`` prints full ÷ masked for boxes and diagonal strips, beside the limit by
operations, and the time of all masked rows together beside one after the other. Channels are fewer than in
checkpoints.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import click
import torch
from torch import Tensor

from giornata.packed.compute_set import BlockInputs, CachedTokens, Region, make_region
from giornata.planning.operations import SequenceShape
from giornata.runtime import keep_freed
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens, UnetPicture
from giornata_lab.bench.compute.unets import MASKS, SHAPES, network, touched_tiles
from giornata_lab.bench.compute.workload import operation_limit
from giornata_lab.bench.options import clock_of
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed

Network = UnetInpaint | UnetFill
RATIOS: Final = (0.11, 0.2)
Step = Callable[[], Tensor]


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--shapes", type=Several(click.Choice(list(SHAPES))), default="sdxl,sd"),
            option("--threads", type=int, default=os.cpu_count(), help="of torch"),
            option("--repeats", type=int, default=3),
            option("--processor-time", is_flag=True, help="what this process computed, not the clock"),
        ],
        arguments,
    )


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/unet_step.json``."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    keep_freed()  # as a denoiser does
    lines = [line for name in options.shapes for line in _lines(name, options)]
    write("unet_step", lines, workload=vars(options))


def _lines(name: str, options: SimpleNamespace) -> list[dict[str, Any]]:
    made, side = network(name)
    picture, everything = tiny_unet.picture(made, (side, side), words=77), Everything()
    full = forward(made, [picture], [None])
    forward(made, [picture], [None], [BlockInputs(recorder=everything)])()
    where = {
        (shape, ratio): make_region(touched_tiles(mask(side * made.side, ratio), made.side))
        for shape, mask in MASKS.items()
        for ratio in RATIOS
    }
    taking = {key: taking(made, everything, place) for key, place in where.items() if place is not None}
    steps: dict[object, Step] = {"full": full}
    for key, use in taking.items():
        steps[key] = forward(made, [picture], [where[key]], [use])
    steps["together"] = forward(
        made, [picture] * len(taking), [where[key] for key in taking], list(taking.values())
    )
    times = _measured(steps, options)
    apart = [sum(each) for each in zip(*(times[key] for key in taking), strict=True)]
    together = statistics.median(one / every for one, every in zip(times["together"], apart, strict=True))
    lines = []
    for (shape, ratio), place in where.items():
        if place is not None:
            line = _line(made.blocks, side * side, len(place.computed), times["full"], times[shape, ratio])
            mask = f"{shape} {ratio}"
            lines.append({"shape": name, "mask": mask, **line, "together ÷ apart": round(together, 2)})
    return lines


def _line(
    specs: Sequence[BlockSpec], tiles: int, computed: int, full: list[float], masked: list[float]
) -> dict[str, Any]:
    ratios = [whole / own for whole, own in zip(full, masked, strict=True)]
    return {
        "tiles": f"{computed} of {tiles}",
        "full ÷ masked": round(statistics.median(ratios), 2),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "limit": round(operation_limit(specs, SequenceShape(0, tiles, computed), BlockMode.KV), 2),
        "full ms": round(statistics.median(full)),
        "masked ms": round(statistics.median(masked)),
    }


def taking(made: Network, everything: Everything, place: Region) -> BlockInputs:
    """Return what a row takes, gathered once as an engine's slabs are."""
    source = RecordedUnetTokens(everything, place, room=True)
    return BlockInputs(CachedTokens((BlockMode.KV,) * len(made.blocks), Gathered(source)))


class Gathered:
    """A source whose parts are gathered when they are first asked for."""

    keeps = True

    def __init__(self, of: RecordedUnetTokens) -> None:
        self.hidden = of.hidden
        self.keys_values = cache(of.keys_values)
        self.part = cache(of.part)


def forward(
    made: Network,
    pictures: Sequence[UnetPicture],
    where: Sequence[Region | None],
    uses: Sequence[BlockInputs] = (),
) -> Step:
    """A forward over these pictures, each computed where `where` says."""
    batch = made.assemble(
        [tiny_unet.inputs(made, one, place) for one, place in zip(pictures, where, strict=True)]
    )
    latents, steps = torch.cat([one.latent for one in pictures]), [one.step for one in pictures]
    conditioning = [one.conditioning for one in pictures]
    return lambda: made.predict(batch, latents, conditioning, steps, uses=uses)


def _measured(steps: dict[object, Step], options: SimpleNamespace) -> dict[Any, list[float]]:
    """Milliseconds of every step; they take turns, and the first turn warms up."""
    clock, times = clock_of(options), {key: list[float]() for key in steps}
    for turn in range(options.repeats + 1):
        for key, step in steps.items():
            began = clock()
            step()
            if turn:
                times[key].append((clock() - began) * 1e3)
    return times


if __name__ == "__main__":
    main()
