"""Plans of a row's blocks: what each may do and costs, when a sequence ends, and which mode each takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from giornata.wire.values import BlockMode

# What a block may do and costs, when a sequence of blocks ends, and which mode each block takes. Pure.
#
# FlashPS (EuroSys '26, section 4.2) decides block by block, by its Algorithm 1, whether to load or to
# compute. That is not optimal: a load that pays for its own block can delay every later one. `exact` keeps,
# for every number of slabs loaded so far and for both states of the outside tokens' hidden state (at hand
# or gone), the earliest end of computing; two plans that agree in these differ in nothing that matters
# later, so the later one is dropped and no optimum is lost.


Times = NDArray[np.float64]
"""(slabs + 1,) earliest end of computing in ms by slabs that the row itself has loaded; inf where there is none. One
of each state of the outside tokens' hidden state: GONE, and LIVE, at hand.
"""
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
MODES: Final = tuple(BlockMode)
Modes = tuple[BlockMode, ...]
"""A mode for every block."""


@dataclass(frozen=True)
class BlockCost:
    """One block of one step: what each mode takes, and what has to be loaded for it first."""

    full_ms: float
    hidden_ms: float
    kv_ms: float
    hidden_slabs: int
    """Slabs of the outside tokens' input; 0 where it is on the device already."""
    kv_slabs: int
    """Slabs of their keys and values; 0 where these are on the device already."""
    fresh: bool = False
    """It is a step's first block, where the outside tokens' hidden state is always at hand."""
    others_ms: float = 0.0
    """Time that other rows of the batch add to this block."""
    others_slabs: int = 0
    """Slabs of other rows that this block waits for."""
    hidden_kept: bool = True
    kv_kept: bool = True
    """Whether the template keeps a hidden state, and keys and values."""

    def compute_ms(self, mode: BlockMode, *, live: bool) -> float:
        """Time of this row and the others; infinite where the mode needs what is neither at hand (`live`) nor kept."""
        if mode is BlockMode.KV:
            return self.others_ms + self.kv_ms if self.kv_kept else math.inf
        if not (live or self.fresh or self.hidden_kept):
            return math.inf
        return self.others_ms + (self.full_ms if mode is BlockMode.FULL else self.hidden_ms)

    def slabs(self, mode: BlockMode, *, live: bool) -> int:
        """Slabs that this row loads; `live`: the outside tokens' hidden state is at hand."""
        if mode is BlockMode.KV:
            return self.kv_slabs
        return 0 if live or self.fresh else self.hidden_slabs


@dataclass(frozen=True)
class LoadLink:
    """The path on which the loader moves slabs, one after the other, in the order of the blocks."""

    slab_ms: float
    busy_ms: float = 0.0
    """Time until it is free for this plan's first slab."""


@dataclass(frozen=True)
class BlockTimeline:
    """The times at which the blocks of a plan end, from now; never where a block does not find its entry."""

    ended_ms: tuple[float, ...]
    slabs: int
    waits: bool
    """Whether a block begins later than the one before has ended."""

    @property
    def finish_ms(self) -> float:
        """End of the last block."""
        return self.ended_ms[-1] if self.ended_ms else 0.0


def timeline(blocks: Sequence[BlockCost], modes: Sequence[BlockMode], link: LoadLink) -> BlockTimeline:
    """Run `modes`: a block begins when the one before has ended and all of its slabs are there.

    Raises:
        ValueError: not one mode a block.
    """
    if len(blocks) != len(modes):
        raise ValueError(f"received {len(modes)} modes for {len(blocks)} blocks")
    ended = []
    slabs, now, live, waits = 0, 0.0, False, False
    for block, mode in zip(blocks, modes, strict=True):
        needed = block.slabs(mode, live=live) + block.others_slabs
        slabs += needed
        there = link.busy_ms + slabs * link.slab_ms if needed else 0.0
        waits = waits or there > now
        now = max(now, there) + block.compute_ms(mode, live=live)
        live = mode is BlockMode.FULL
        ended.append(now)
    return BlockTimeline(tuple(ended), slabs, waits)


class StepCacheReads(NamedTuple):
    """The entries that the blocks of one step take from the cache."""

    forms: Modes
    """`KV`, `HIDDEN`, which a block in full may need too, or `FULL` for nothing."""
    kv: Counts
    """(blocks,): 1 where a block takes keys and values, else 0."""
    hidden: Counts
    """As `kv`: where it takes a hidden state."""


@lru_cache(maxsize=1024)
def takes(modes: Modes) -> StepCacheReads:
    """Return what a step in these `modes` takes: no hidden state where it is at hand; see :class:`BlockCost`."""
    forms, live = [], True
    for mode in modes:
        forms.append(BlockMode.KV if mode is BlockMode.KV else BlockMode.FULL if live else BlockMode.HIDDEN)
        live = mode is BlockMode.FULL
    kv, hidden = (
        np.array([form is one for form in forms], np.int64) for one in (BlockMode.KV, BlockMode.HIDDEN)
    )
    return StepCacheReads(tuple(forms), kv, hidden)


def sequential_end_ms(blocks: Sequence[BlockCost], modes: Sequence[BlockMode], link: LoadLink) -> float:
    """When `modes` end, in ms, if everything is loaded before computing begins: FlashPS's naive loading (figure 9)."""
    computing = timeline(blocks, modes, LoadLink(0.0))
    loading_ms = link.busy_ms + computing.slabs * link.slab_ms if computing.slabs else 0.0
    return loading_ms + computing.finish_ms


Planner = Callable[[Sequence[BlockCost], LoadLink], Modes]


class PlanBackpointers(NamedTuple):
    """The predecessors of the states after a block, by slabs."""

    by_kv: Flags
    """Into GONE: by keys and values, not by the hidden state."""
    from_live: Flags
    """The hidden state was at hand, not loaded."""
    gone_first: Flags
    """Before the block, by its own slabs: GONE ended earlier than LIVE."""


def exact_modes(blocks: Sequence[BlockCost], link: LoadLink) -> Modes:
    """The modes with the earliest end; among equals, the ones that load least.

    Dynamic programming over (slabs, live), vectorised over slabs: time O(blocks * slabs).
    """
    most = sum(max(block.hidden_slabs, block.kv_slabs) for block in blocks)
    gone, live = np.full(most + 1, np.inf), np.full(most + 1, np.inf)
    gone[0] = 0.0
    arrival = link.busy_ms + link.slab_ms * np.arange(most + 1)
    others = 0
    choices: list[PlanBackpointers] = []
    for block in blocks:
        others += block.others_slabs
        there: Times = np.add(arrival, others * link.slab_ms, dtype=np.float64)
        gone, live, chosen = _advance(block, gone, live, there)
        choices.append(chosen)
    return _traced(blocks, gone, live, choices)


def _advance(
    block: BlockCost, gone: Times, live: Times, arrival: Times
) -> tuple[Times, Times, PlanBackpointers]:
    """The states after one block, and how each was reached.

    Six ways: into GONE by keys and values from either state, or by the hidden state of either; into LIVE by computing
    everything from either.
    """
    waits = bool(block.others_slabs)
    at_hand = np.maximum(live, arrival) if waits else live
    fetched = gone if block.fresh else _shifted(gone, block.hidden_slabs)
    if waits or (block.hidden_slabs and not block.fresh):
        fetched = np.maximum(fetched, arrival)
    kv = _shifted(np.minimum(gone, live), block.kv_slabs)
    if waits or block.kv_slabs:
        kv = np.maximum(kv, arrival)
    cached = kv + block.compute_ms(BlockMode.KV, live=True)
    lost_ms = 0.0 if block.fresh or block.hidden_kept else math.inf  # it can not be loaded
    source = fetched + lost_ms
    from_live = at_hand <= source
    hidden = np.minimum(source, at_hand)
    projected = hidden + block.compute_ms(BlockMode.HIDDEN, live=True)
    after_live = hidden + block.compute_ms(BlockMode.FULL, live=True)
    by_kv = cached <= projected
    return np.minimum(cached, projected), after_live, PlanBackpointers(by_kv, from_live, gone < live)


def _shifted(times: Times, slabs: int) -> Times:
    """The times after loading `slabs` more."""
    if not slabs:
        return times
    moved = np.full_like(times, np.inf)
    moved[slabs:] = times[:-slabs]
    return moved


def _traced(blocks: Sequence[BlockCost], gone: Times, live: Times, choices: list[PlanBackpointers]) -> Modes:
    slabs = int(np.minimum(gone, live).argmin())
    is_live = bool(live[slabs] <= gone[slabs])
    modes: list[BlockMode] = []
    for block, chosen in zip(reversed(blocks), reversed(choices), strict=True):
        mode = BlockMode.FULL if is_live else BlockMode.KV if chosen.by_kv[slabs] else BlockMode.HIDDEN
        modes.append(mode)
        if mode is BlockMode.KV:
            slabs -= block.kv_slabs
            is_live = not chosen.gone_first[slabs]
        else:
            is_live = bool(chosen.from_live[slabs])
            slabs -= block.slabs(mode, live=is_live)
    return tuple(reversed(modes))


def greedy_modes(blocks: Sequence[BlockCost], link: LoadLink) -> Modes:
    """Algorithm 1 of FlashPS, with a third mode: each block takes what ends first, the cache on a tie."""
    modes: list[BlockMode] = []
    slabs, now, live = 0, 0.0, False
    for block in blocks:
        options = []
        for mode in reversed(MODES):
            needed = block.slabs(mode, live=live) + block.others_slabs
            there = link.busy_ms + (slabs + needed) * link.slab_ms if needed else 0.0
            options.append((max(now, there) + block.compute_ms(mode, live=live), mode, needed))
        now, mode, needed = min(options, key=lambda option: option[0])
        slabs += needed
        live = mode is BlockMode.FULL
        modes.append(mode)
    return tuple(modes)


def uniform_modes(mode: BlockMode) -> Planner:
    """One mode for every block: `kv` and `hidden` are FlashPS's strawman loading (figure 9), `full` is no reuse."""
    return lambda blocks, _: (mode,) * len(blocks)


# A row's blocks as columns, one number of every block each: what plans of many blocks compute with. Pure.


Column = NDArray[np.float64]
"""(blocks,) milliseconds or slabs."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockCostColumns(Sequence[BlockCost]):
    """The blocks of one row, with nothing computed beside it; each column is (blocks,), as in :class:`BlockCost`."""

    full_ms: Column
    hidden_ms: Column
    kv_ms: Column
    hidden_slabs: Column
    """Whole numbers, as in `kv_slabs`."""
    kv_slabs: Column
    fresh: Flags
    hidden_kept: Flags
    kv_kept: Flags

    @classmethod
    def of(cls, blocks: Sequence[BlockCost]) -> BlockCostColumns:
        """The columns of `blocks`, without what they wait for beside their own."""
        if isinstance(blocks, BlockCostColumns):
            return blocks
        numbers = np.array(
            [(b.full_ms, b.hidden_ms, b.kv_ms, b.hidden_slabs, b.kv_slabs) for b in blocks], float
        )
        flags = np.array([(b.fresh, b.hidden_kept, b.kv_kept) for b in blocks], bool)
        return cls(*numbers.reshape(-1, 5).T.copy(), *flags.reshape(-1, 3).T.copy())

    def __len__(self) -> int:
        return len(self.full_ms)

    @overload
    def __getitem__(self, index: int) -> BlockCost: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockCost]: ...

    def __getitem__(self, index: int | slice) -> BlockCost | Sequence[BlockCost]:
        return self._blocks[index]

    @cached_property
    def _blocks(self) -> tuple[BlockCost, ...]:
        """The same as objects, made once: planners that go block by block ask for them."""
        columns = (self.full_ms, self.hidden_ms, self.kv_ms, self.hidden_slabs, self.kv_slabs)
        flags = zip(*(c.tolist() for c in (self.fresh, self.hidden_kept, self.kv_kept)), strict=True)
        return tuple(
            BlockCost(
                full, hidden, kv, int(hidden_slabs), int(kv_slabs), fresh, hidden_kept=kept, kv_kept=kv_kept
            )
            for (full, hidden, kv, hidden_slabs, kv_slabs), (fresh, kept, kv_kept) in zip(
                zip(*(column.tolist() for column in columns), strict=True), flags, strict=True
            )
        )
