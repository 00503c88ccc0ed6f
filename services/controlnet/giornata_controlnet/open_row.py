"""A row that is open here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from giornata.control.expansion import Behind, ResidualLayout, summed
from giornata.control.running import RowControlNet
from giornata.packed.region import Region
from giornata.wire.controlnets import ControlBase


@dataclass(frozen=True, eq=False)
class ActiveControlNet:
    """A ControlNet of a row, and the steps in which it acts."""

    act: RowControlNet
    first: int
    end: int
    """The first step after them."""
    work: float
    """Multiplications in each of them, of all sequences."""


@dataclass(frozen=True, eq=False)
class OpenRow:
    """What all steps of a row share."""

    key: str
    denoiser: str
    """The instance that has opened it, and alone may ask for its steps."""
    nets: Sequence[ActiveControlNet]
    """Those that act in any step, in the order of the job."""
    behind: tuple[Behind, ...]
    """Which sample each ControlNet of the job adds behind each block; all None for one that never acts."""
    base: ControlBase
    grid: tuple[int, int]
    times: tuple[float, ...]
    """What the network is told of each step."""
    sequences: int
    """For how many of the row's sequences ControlNets are computed."""
    region: Region | None
    """The tokens of steps that are not whole, on the ControlNets' device; None: all tokens."""
    pins: ExitStack
    """Closed when the row is: lets go of its weights."""
    _sums: dict[tuple[bool, ...], ResidualLayout] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of the picture."""
        return self.grid[0] * self.grid[1]

    def acting(self, step: int) -> list[RowControlNet]:
        """The ControlNets that act in a step."""
        return [net.act for net in self.nets if net.first <= step < net.end]

    def work(self, step: int) -> float:
        """Multiplications of a step that computes the whole picture."""
        return sum(net.work for net in self.nets if net.first <= step < net.end)

    def sums(self, step: int) -> ResidualLayout:
        """The sums of a step's samples."""
        acts = self._acts(step)
        if acts not in self._sums:
            self._sums[acts] = summed(
                [net.act.behind for net, some in zip(self.nets, acts, strict=True) if some]
            )
        return self._sums[acts]

    def shapes(self, step: int, *, whole: bool) -> tuple[tuple[int, int], ...]:
        """(tokens, channels) of each sum of a step, the sequences one behind the other."""
        tokens = self.tokens if whole or self.region is None else len(self.region.computed)
        return tuple((self.sequences * tokens, self.base.channels[block]) for block in self.sums(step).first)

    def _acts(self, step: int) -> tuple[bool, ...]:
        """By ControlNet, whether it acts in a step."""
        return tuple(net.first <= step < net.end for net in self.nets)
