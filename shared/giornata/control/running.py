"""One step of the ControlNets of several rows: whatever rows share a ControlNet share its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.control.expansion import Behind, summed
from giornata.control.protocol import ControlNet, ControlSequenceStep
from giornata.packed.region import Region


@dataclass(frozen=True, eq=False)
class RowControlNet:
    """A ControlNet that acts on a row."""

    net: ControlNet
    opened: object
    """What it made of the row when it was opened."""
    scale: float
    behind: Behind


@dataclass(frozen=True, eq=False)
class RowStep:
    """One row's next step."""

    acts: Sequence[RowControlNet]
    """At least one; all of one kind."""
    step: int
    latents: Tensor
    """(tokens, channels) of the whole picture, on the ControlNets' device and in their dtype."""
    sequences: int = 1
    """For how many sequences; see :func:`giornata.control.expansion.sequences`."""
    region: Region | None = None
    """The tokens that are asked for; None for all. On the ControlNets' device."""
    whole: bool = True
    """Whether all tokens are asked for although there is a region."""


class ScaledResidual(NamedTuple):
    """One sum of samples, scaled."""

    row: int
    """Which of the rows."""
    nth: int
    """Which of its sums, as :func:`giornata.control.expansion.summed` counts them."""
    sample: Tensor
    """(sequences, tokens, channels)"""


class _ControlNetForward:
    """The forward of one ControlNet; its samples are computed as they are asked for."""

    def __init__(self, net: ControlNet) -> None:
        self._net = net
        self._items: list[ControlSequenceStep] = []
        self._computing: Iterator[tuple[Tensor, ...]] | None = None
        self._made: list[tuple[Tensor, ...]] = []

    def add(self, items: Sequence[ControlSequenceStep]) -> tuple[int, ...]:
        """The places of these `items` in every sample."""
        first = len(self._items)
        self._items += items
        return tuple(range(first, len(self._items)))

    def sample(self, nth: int) -> tuple[Tensor, ...]:
        """By item, (tokens, channels)."""
        if self._computing is None:
            self._computing = self._net.run(self._items)
        while len(self._made) <= nth:
            self._made.append(next(self._computing))
        return self._made[nth]


@torch.inference_mode()
def run(rows: Sequence[RowStep]) -> Iterator[ScaledResidual]:
    """What the ControlNets of `rows` add in their steps: in the order of blocks, as it is computed."""
    forwards: dict[int, _ControlNetForward] = {}
    places: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        for nth, act in enumerate(row.acts):
            forward = forwards.setdefault(id(act.net), _ControlNetForward(act.net))
            places[number, nth] = forward.add(
                [ControlSequenceStep(act.opened, row.step, row.latents, one) for one in range(row.sequences)]
            )
    sums = [summed([act.behind for act in row.acts]) for row in rows]
    order = sorted(
        (block, number, index) for number, each in enumerate(sums) for index, block in enumerate(each.first)
    )
    for _, number, index in order:
        total: Tensor | None = None
        row = rows[number]
        for nth, sample in sums[number].parts[index]:
            made = forwards[id(row.acts[nth].net)].sample(sample)
            own = [made[place] for place in places[number, nth]]
            part = own[0][None] if len(own) == 1 else torch.stack(own)
            if row.region is not None and not row.whole:
                part = part.index_select(1, row.region.computed)
            part = part * row.acts[nth].scale
            total = part if total is None else total + part
        if total is not None:
            yield ScaledResidual(number, index, total)
