"""One forward of a UNet over the tiles of a mask beside one over the whole picture, and several rows in one forward.

``python -m giornata_lab.bench.unet_step`` prints full ÷ masked for boxes and diagonal strips, beside the limit by
operations, and the time of all masked rows together beside one after the other. Channels are fewer than in
checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import click
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.packing import BlockInputs, CachedTokens, Region, make_region
from giornata.planning.operations import SequenceShape
from giornata.runtime import keep_freed
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.models import FAMILIES
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens, UnetPicture
from giornata_lab.bench.compute.workload import operation_limit
from giornata_lab.bench.harness import clock_of, compared, in_turns, median_ms, write
from giornata_lab.flags import Several, option, parsed

SHAPES: Final[Mapping[str, tuple[str, int, Mapping[str, Any]]]] = {
    "sdxl": ("xl", 128, FAMILIES["sdxl"].mid),
    "sd": ("sd", 64, FAMILIES["sd"].mid),
    "tiny": ("xl", 32, {}),
}
"""Name → kind, latent pixels a side of a picture, configuration: SDXL and Stable Diffusion with fewer channels."""


def box(side: int, ratio: float) -> Tensor:
    """(side, side) bool latent pixels: a square in the middle."""
    width = max(1, round(side * ratio**0.5))
    start = (side - width) // 2
    touched = torch.zeros(side, side, dtype=torch.bool)
    touched[start : start + width, start : start + width] = True
    return touched


def strip(side: int, ratio: float) -> Tensor:
    """(side, side) bool latent pixels: a diagonal band from corner to corner; its smallest window is the picture."""
    cell = torch.arange(side)
    far = (cell[:, None] - cell[None, :]).abs()
    return far <= far.flatten().sort().values[round(ratio * side * side) - 1]


MASKS: Final = {"box": box, "strip": strip}


def touched_tiles(mask: Tensor, side: int) -> Tensor:
    """(height, width) bool tiles of `side` latent pixels that a mask of latent pixels touches."""
    return F.max_pool2d(mask[None, None].float(), side)[0, 0] > 0


def network(name: str) -> tuple[UnetInpaint | UnetFill, int]:
    """The network of a shape, and the side of its picture in tiles."""
    kind, latent, config = SHAPES[name]
    made = tiny_unet.network(kind, **config)
    return made, latent // made.side


Network = UnetInpaint | UnetFill
RATIOS: Final = (0.11, 0.2)
Step = Callable[[], Tensor]


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/unet_step.json``."""
    options = parsed(
        __doc__,
        [
            option("--shapes", type=Several(click.Choice(list(SHAPES))), default="sdxl,sd"),
            option("--threads", type=int, default=os.cpu_count(), help="of torch"),
            option("--repeats", type=int, default=3),
            option("--processor-time", is_flag=True, help="what this process computed, not the clock"),
        ],
        arguments,
    )
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
    taken = {key: taking(made, everything, place) for key, place in where.items() if place is not None}
    steps: dict[object, Step] = {"full": full}
    for key, use in taken.items():
        steps[key] = forward(made, [picture], [where[key]], [use])
    steps["together"] = forward(
        made, [picture] * len(taken), [where[key] for key in taken], list(taken.values())
    )
    times = in_turns(steps, options.repeats, clock=clock_of(options))
    apart = [sum(each) for each in zip(*(times[key] for key in taken), strict=True)]
    together = compared("together ÷ apart", times["together"], apart)["together ÷ apart"]
    lines = []
    for (shape, ratio), place in where.items():
        if place is not None:
            line = _line(made.blocks, side * side, len(place.computed), times["full"], times[shape, ratio])
            mask = f"{shape} {ratio}"
            lines.append({"shape": name, "mask": mask, **line, "together ÷ apart": together})
    return lines


def _line(
    specs: Sequence[BlockSpec], tiles: int, computed: int, full: list[float], masked: list[float]
) -> dict[str, Any]:
    return {
        "tiles": f"{computed} of {tiles}",
        **compared("full ÷ masked", full, masked),
        "limit": round(operation_limit(specs, SequenceShape(0, tiles, computed), BlockMode.KV), 2),
        "full ms": median_ms(full),
        "masked ms": median_ms(masked),
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


if __name__ == "__main__":
    main()
