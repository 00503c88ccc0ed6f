"""What ControlNets add to a UNet: they join where its decoder begins to read, and may be waited for until then.

`UNet2DConditionModel.forward` adds `down_block_additional_residuals` to all skip connections before the decoder runs.
Here each up block adds what it reads: the encoder and the middle of the network run before anything is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from giornata.packed.region import Region
from giornata.packed.tiles import joined
from giornata.packed.uses import Residuals
from giornata_denoiser.families.unet.tiling import Tiling


@dataclass(frozen=True, eq=False)
class SequenceResiduals:
    """What is added to one sequence of a forward.

    Sample `n` of `residuals` is of skip connection `n`, in the encoder's order; one more is of the middle's output. A
    token is a tile of that map.
    """

    residuals: Residuals
    items: tuple[int, int]
    """First item in the forward's batch, and the first behind: the sequence's picture, or its tiles."""
    grid: tuple[int, int] | None
    """Height and width of the picture in tiles, where it is one item; None where its tiles are the items."""
    region: Region | None = None
    """The tiles that are items, where these are not all."""

    def add(self, index: int, hidden: Tensor) -> None:
        """Add sample `index` to `hidden` in place; it is (items, channels, height, width) of all sequences."""
        sample = self.residuals.sample(index)
        if sample is None:
            return
        own = hidden[slice(*self.items)]
        if self.grid is not None:
            side = hidden.shape[2] // self.grid[0]
            tiles = sample.view(1, len(sample), hidden.shape[1], side, side)
            own += joined(tiles, self.grid).to(hidden.dtype)
            return
        if self.region is not None and self.residuals.whole:
            sample = sample.index_select(0, self.region.computed.to(sample.device))
        own += sample.view(own.shape).to(hidden.dtype)


def maps_joined(
    residuals: Mapping[int, Residuals], of: Sequence[int], grid: tuple[int, int]
) -> tuple[SequenceResiduals, ...]:
    """What is added to the sequences `of`, whose pictures are items; `residuals` are by sequence."""
    places = enumerate(of)
    return tuple(
        SequenceResiduals(residuals[i], (place, place + 1), grid) for place, i in places if i in residuals
    )


def tiles_joined(
    residuals: Mapping[int, Residuals], of: Sequence[int], tiling: Tiling
) -> tuple[SequenceResiduals, ...]:
    """The same for sequences whose computed tiles are items."""
    places = zip(of, tiling.tiles.bounds, tiling.regions, strict=True)
    return tuple(
        SequenceResiduals(residuals[i], bounds, None, region)
        for i, bounds, region in places
        if i in residuals
    )


class UnetResidualHooks:
    """Hooks on the up blocks of a `unet`, which add what joins the forward that is under way."""

    def __init__(self, unet: Any) -> None:
        self.now: Sequence[SequenceResiduals] = ()
        """What joins the forward that is under way."""
        self.middle = 1 + sum(
            len(block.resnets) + len(block.downsamplers or ()) for block in unet.down_blocks
        )
        """The sample of the middle's output, behind those of all skip connections."""
        end = self.middle
        for block in unet.up_blocks:
            start = end - len(block.resnets)
            block.register_forward_pre_hook(partial(self._join, (start, end)), with_kwargs=True)
            end = start

    def _join(
        self, skips: tuple[int, int], _block: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.now:
            return None
        start, end = skips
        read = given["res_hidden_states_tuple"]
        found = tuple(self._added(start + nth, skip) for nth, skip in enumerate(read))
        given = {**given, "res_hidden_states_tuple": found}
        if end == self.middle:
            given["hidden_states"] = self._added(self.middle, given["hidden_states"])
        return args, given

    def _added(self, index: int, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        for each in self.now:
            each.add(index, hidden)
        return hidden
