"""A running row at the planner: what serves it, what that still has to load, and in which modes its blocks run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from giornata.packed.uses import Reuse, Use
from giornata.planning.batch import BatchPlanner, BatchRow
from giornata.planning.blocks import Link
from giornata.planning.costs import SLABS, Loads, Shape, StepCosts, row_blocks, slab_unit
from giornata.wire.values import Mode
from giornata_denoiser.blocks.correction import Correction
from giornata_denoiser.blocks.loads import Load
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.rows.template import Entry, Kept

NOTHING: Final = Loads()


@dataclass(frozen=True, eq=False)
class Served:
    """A row that takes from one entry: the slabs and shapes of its sequences, and its modes."""

    entry: Entry
    slabs: tuple[Slabs, ...]
    shapes: tuple[Shape, ...]
    modes: tuple[Mode, ...]
    """Of every block; until they are planned, the cheapest of what the blocks kept."""
    final: bool = False
    """Nothing that is still to be loaded would change the modes."""
    corrections: tuple[Correction, ...] = ()
    """Of a step that is computed in full to learn them, one of each sequence."""
    step: int = 0
    """Of the row, when it was last served."""

    @property
    def size_bytes(self) -> int:
        """Of all slabs that the modes take."""
        return sum(slabs.size_bytes(block, mode) for slabs, block, mode in self._taken())

    @property
    def missing_bytes(self) -> int:
        """What has to move for the modes."""
        return sum(slabs.load_bytes(block, mode) for slabs, block, mode in self._taken())

    @property
    def computed(self) -> tuple[Mode, ...]:
        """What the step computes."""
        return (Mode.FULL,) * len(self.modes) if self.corrections else self.modes

    def uses(self) -> tuple[Use, ...]:
        """One of each sequence."""
        return self.corrections or tuple(Reuse(self.modes, slabs) for slabs in self.slabs)

    def loads(self) -> tuple[Loads, ...]:
        """What every block's modes would have to move."""
        return tuple(self._loads_of(block) for block in range(len(self.modes)))

    def load(self, block: int) -> Iterator[Load]:
        """What the block's mode takes, whether it is here or not."""
        if self.modes[block] is not Mode.FULL:
            yield from (Load(slabs, block, self.modes[block]) for slabs in unique(self.slabs))

    def _taken(self) -> Iterator[tuple[Slabs, int, Mode]]:
        return ((slabs, block, mode) for slabs in unique(self.slabs) for block, mode in enumerate(self.modes))

    def _loads_of(self, block: int) -> Loads:
        kept, slabs = self.entry.blocks[block], unique(self.slabs)
        return Loads(
            hidden_bytes=sum(each.load_bytes(block, Mode.HIDDEN) for each in slabs),
            kv_bytes=sum(each.load_bytes(block, Mode.KV) for each in slabs),
            hidden_kept=kept.hidden is not None,
            kv_kept=kept.key is not None,
        )


def unique(slabs: Iterable[Slabs]) -> tuple[Slabs, ...]:
    """Each once, where sequences share them."""
    return tuple(dict.fromkeys(slabs))


def preferred(entry: Entry) -> tuple[Mode, ...]:
    """The modes that compute least, if everything that was kept is here.

    A block that kept nothing computes in full; where the outside tokens' hidden state is gone by then, so must all
    blocks before it, back to one that kept their input.
    """
    modes = [_cheapest(kept) for kept in entry.blocks]
    for block in range(len(modes) - 1, 0, -1):
        needs = modes[block] is Mode.FULL and entry.blocks[block].hidden is None
        if needs:
            modes[block - 1] = Mode.FULL
    return tuple(modes)


def planned(
    now: Sequence[Served],
    following: Sequence[Served | None],
    costs: StepCosts,
    planner: BatchPlanner,
    *,
    beside_ms: float,
    busy_ms: float,
    shared: bool,
) -> tuple[list[Served], float]:
    """The rows with the modes of this step, and its predicted end in ms, its fixed costs not counted.

    Plans across the step boundary: a load that this step could wait for may be the next step's delay.

    Args:
        now: rows of one model that are served in this step.
        following: for each of them what serves it in the next step, where that is another entry.
        costs: of the machine.
        planner: of :data:`giornata.planning.batch.PLANNERS`.
        beside_ms: what each block takes besides these rows.
        busy_ms: until the loader begins with what is planned here.
        shared: rows of one entry load it once.
    """
    blocks = len(now[0].modes)
    beyond = any(after is not None for after in following)
    windows = [
        row.loads() + _beyond(after, blocks * beyond) for row, after in zip(now, following, strict=True)
    ]
    unit = slab_unit(load for window in windows for load in window)
    link = Link(costs.load[0] / SLABS + costs.load[1] * unit, busy_ms)
    rows = [
        BatchRow(
            row_blocks(costs, row.shapes, window, unit, blocks),
            id(row.entry) if shared else id(row.slabs[0]),
        )
        for row, window in zip(now, windows, strict=True)
    ]
    plan = planner(rows, link, beside_ms)
    chosen = [replace(row, modes=modes[:blocks]) for row, modes in zip(now, plan.modes, strict=True)]
    return [_settled(row) for row in chosen], plan.timeline.ended_ms[blocks - 1]


def _beyond(after: Served | None, blocks: int) -> tuple[Loads, ...]:
    """Of the next step, as far as the plan looks that far."""
    return (NOTHING,) * blocks if after is None else after.loads()


def _settled(row: Served) -> Served:
    """Final, if the modes are those of a row that has loaded everything."""
    return replace(row, final=row.modes == preferred(row.entry) or not any(map(_moves, row.loads())))


def _moves(loads: Loads) -> bool:
    return loads.hidden_bytes + loads.kv_bytes > 0


def _cheapest(kept: Kept) -> Mode:
    if kept.key is not None:
        return Mode.KV
    return Mode.FULL if kept.hidden is None else Mode.HIDDEN
