"""Plans of blocks: which of them take from the template cache, so that loading hides behind computing. Pure.

FlashPS (EuroSys '26, section 4.2) decides block by block, by its Algorithm 1 (:func:`greedy_modes`), whether to load or
to compute. That is not optimal: a load that pays for its own block can delay every later one. Times are milliseconds;
loads are counted in slabs, the unit in which the loader moves bytes, so that plans have few states.

All rows of a batch meet at every block and share one link, so that a row's best plan depends on the others'. Rows that
keep no hidden states, the default, have few plans each: once such a row has taken keys and values, the outside tokens'
hidden state is gone for the rest of the step. So many blocks are computed in full, then come keys and values; between
the two, at most one block may project keys and values from the hidden state that is still at hand. :func:`scanned`
times all of these at once. Other rows are planned by :func:`exact_modes`, one beside the others, until none improves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from giornata.planning.operations import (
    CODES,
    FULL,
    KV,
    Array,
    BatchRow,
    Counts,
    Flags,
    LoadLink,
    Modes,
    RowBlocks,
)
from giornata.wire.values import BlockMode

ROUNDS: Final = 4
"""Most rounds over all rows with hidden states; a round that improves nothing is the last."""
MOVES: Final = 12
"""Most improvements of a batch's plan of rows without."""
WORTH: Final = 1e-3
"""Share of a window that such an improvement has to save: finding it takes time too."""
EQUAL: Final = 1e-9
"""Share of its time by which a plan has to be better: less is rounding."""


@dataclass(frozen=True)
class BatchPlan:
    """A plan of every row, and how it runs."""

    modes: tuple[Modes, ...]
    ended_ms: tuple[float, ...]
    """The time at which each block ends, from now; never where one does not find its entry."""
    slabs: int
    """Loaded by all rows."""
    waits: bool
    """Whether a block begins later than the one before has ended."""

    @property
    def finish_ms(self) -> float:
        """End of the last block."""
        return self.ended_ms[-1]


Beside: TypeAlias = float | Array
"""What each block takes besides, in ms: (blocks,), or the same for each."""
RowPlanner = Callable[[RowBlocks, LoadLink, Beside], Modes]
"""Finds modes for a row alone."""
BatchPlanner = Callable[[Sequence[BatchRow], LoadLink, float], BatchPlan]
"""Finds modes for every row; the last argument is the time that every block takes besides, in ms."""


def plan_batch(rows: Sequence[BatchRow], link: LoadLink, base_ms: float = 0.0) -> BatchPlan:
    """Modes for every row, by descent over the best plans of single rows; the best plan where there is one row.

    Where taking keys and values from the cache waits for nothing, nothing is faster, and nothing else is tried.
    `base_ms` is the time of every block beside these rows: rows without a template, and the base of a block.

    Raises:
        ValueError: rows differ in their number of blocks.
    """
    if len({len(row.blocks) for row in rows}) > 1:
        raise ValueError(f"rows have {[len(row.blocks) for row in rows]} blocks; all need as many")
    prefixes = prefix_batch(rows)
    all_kv = ((BlockMode.KV,) * len(rows[0].blocks),) * len(rows)
    plan = evaluate_modes(rows, all_kv if prefixes is None else prefixes.cheapest, link, base_ms)
    if math.isfinite(plan.finish_ms) and not plan.waits and _is_cheapest(rows, plan.modes):
        return plan
    if prefixes is not None:
        return evaluate_modes(rows, plan_prefixes(prefixes, link, base_ms), link, base_ms)
    alone = evaluate_modes(rows, [exact_modes(row.blocks, link, base_ms) for row in rows], link, base_ms)
    begun = (plan, alone) if math.isfinite(plan.finish_ms) else (alone,)
    return min((_improved(rows, each, link, base_ms) for each in begun), key=_rank)


def plan_each_alone(planner: RowPlanner) -> BatchPlanner:
    """A planner of every row alone; `plan_batch` where its plan takes an entry that the template does not keep."""

    def planned(rows: Sequence[BatchRow], link: LoadLink, base_ms: float) -> BatchPlan:
        plan = evaluate_modes(rows, [planner(row.blocks, link, base_ms) for row in rows], link, base_ms)
        return plan if math.isfinite(plan.finish_ms) else plan_batch(rows, link, base_ms)

    return planned


def uniform_modes(mode: BlockMode) -> RowPlanner:
    """One mode for every block: `kv` and `hidden` are FlashPS's strawman loading (figure 9), `full` is no reuse."""
    return lambda blocks, *_: (mode,) * len(blocks)


def evaluate_modes(
    rows: Sequence[BatchRow], modes: Sequence[Modes], link: LoadLink, base_ms: Beside = 0.0
) -> BatchPlan:
    """The plan of a batch with these `modes`: a block of all rows begins when each has what its mode takes.

    Raises:
        ValueError: not one mode for every block of every row.
    """
    for row, chosen in zip(rows, modes, strict=True):
        if len(row.blocks) != len(chosen):
            raise ValueError(f"received {len(chosen)} modes for {len(row.blocks)} blocks")
    taken = _taken(rows, modes)
    slabs = taken.loaded(range(len(rows)))
    # A block ends when all from the start, or from one that waited for its load, has been computed one after the other.
    ended = np.cumsum(taken.ms.sum(axis=0) + base_ms)
    begun = np.concatenate(((0.0,), ended[:-1]))
    there = np.where(slabs > 0, link.busy_ms + np.cumsum(slabs) * link.slab_ms, 0.0)
    with np.errstate(invalid="ignore"):  # what never ends is never later
        late = np.maximum.accumulate(np.where(np.isfinite(begun), there - begun, 0.0))
    before = np.concatenate(((0.0,), np.maximum(late, 0.0)[:-1]))
    waits = bool((late > before + 1e-12 * np.maximum(1.0, begun)).any())
    ends = (ended + np.maximum(late, 0.0)).tolist()
    return BatchPlan(tuple(modes), tuple(ends), int(slabs.sum()), waits)


class _BlocksTaken(NamedTuple):
    """The computing and loading of each row in its modes; each array is (rows, blocks)."""

    ms: Array
    """Infinite where a block would take what is neither at hand nor kept."""
    slabs: Array
    kv: Flags
    """Whether keys and values are loaded, or else a hidden state."""
    templates: tuple[Hashable, ...]

    def loaded(self, rows: Iterable[int]) -> Array:
        """(blocks,) slabs that these rows load; an entry of rows of one template once."""
        slabs = np.zeros(self.slabs.shape[1])
        for members in _members([(self.templates[row], row) for row in rows]):
            for form in (self.kv[members], ~self.kv[members]):
                slabs += np.where(form, self.slabs[members], 0.0).max(axis=0)
        return slabs


def _taken(rows: Sequence[BatchRow], modes: Sequence[Modes]) -> _BlocksTaken:
    def of_all(name: str) -> Array:
        return np.array([getattr(row.blocks, name) for row in rows])

    mode = np.array([_codes(tuple(chosen)) for chosen in modes])
    kv, full = mode == KV, mode == FULL
    live: Flags = of_all("fresh").astype(bool)
    live[:, 1:] |= full[:, :-1]
    ms = np.where(kv, of_all("kv_ms"), np.where(full, of_all("full_ms"), of_all("hidden_ms")))
    ms[~np.where(kv, of_all("kv_kept"), live | of_all("hidden_kept").astype(bool)).astype(bool)] = np.inf
    slabs = np.where(kv, of_all("kv_slabs"), np.where(live, 0.0, of_all("hidden_slabs")))
    return _BlocksTaken(ms, slabs, kv, tuple(row.template for row in rows))


@lru_cache(maxsize=1024)
def _codes(modes: Modes) -> NDArray[np.int8]:
    return np.array([CODES[mode] for mode in modes], np.int8)


def _members(keyed: Iterable[tuple[Hashable, int]]) -> tuple[list[int], ...]:
    members: dict[Hashable, list[int]] = {}
    for key, row in keyed:
        members.setdefault(key, []).append(row)
    return tuple(members.values())


def _is_cheapest(rows: Sequence[BatchRow], modes: Sequence[Modes]) -> bool:
    """Return whether no block could compute less than it does."""
    return all(
        chosen.count(BlockMode.KV) == len(chosen)
        and bool((row.blocks.kv_ms <= np.minimum(row.blocks.hidden_ms, row.blocks.full_ms)).all())
        for row, chosen in zip(rows, modes, strict=True)
    )


def _rank(plan: BatchPlan) -> tuple[float, int]:
    return plan.finish_ms, plan.slabs


# Rows that keep hidden states: each beside the others, by dynamic programming.


def _improved(rows: Sequence[BatchRow], best: BatchPlan, link: LoadLink, base_ms: float) -> BatchPlan:
    for _ in range(ROUNDS if len(rows) > 1 else 0):
        before = best
        for index in range(len(rows)):
            candidate = list(best.modes)
            candidate[index] = _beside_others(rows, best.modes, index, link, base_ms)
            plan = evaluate_modes(rows, candidate, link, base_ms)
            if _rank(plan) < _rank(best):
                best = plan
        if best is before:
            break
    return best


def _beside_others(
    rows: Sequence[BatchRow], modes: Sequence[Modes], index: int, link: LoadLink, base_ms: float
) -> Modes:
    """The row's modes beside the others': an entry of its template that they load costs it nothing."""
    taken, row = _taken(rows, modes), rows[index]
    others = [place for place in range(len(rows)) if place != index]
    same = [place for place in others if rows[place].template == row.template]
    loads, kv = taken.slabs[same] > 0, taken.kv[same]
    blocks = replace(
        row.blocks,
        hidden_slabs=np.where((loads & ~kv).any(axis=0), 0.0, row.blocks.hidden_slabs),
        kv_slabs=np.where((loads & kv).any(axis=0), 0.0, row.blocks.kv_slabs),
    )
    return exact_modes(blocks, link, base_ms + taken.ms[others].sum(axis=0), taken.loaded(others))


class _Backpointers(NamedTuple):
    """The predecessors of the states after a block, each (slabs,)."""

    by_kv: Flags
    """Into GONE: by keys and values, not by the hidden state."""
    from_live: Flags
    """The hidden state was at hand, not loaded."""
    gone_first: Flags
    """Before the block, by its own slabs: GONE ended earlier than LIVE."""


def exact_modes(
    blocks: RowBlocks, link: LoadLink, beside_ms: Beside = 0.0, beside_slabs: Array | None = None
) -> Modes:
    """The modes of a row with the earliest end; among equals, the ones that load least.

    Each block takes `beside_ms` besides, and waits for `beside_slabs`, (blocks,), of other rows. Dynamic programming
    keeps, for every number of slabs loaded so far and for both states of the outside tokens' hidden state (GONE, and
    LIVE, at hand), the earliest end of computing: two plans that agree in these differ in nothing that matters later.
    """
    count = len(blocks)
    beside, waiting = (
        np.broadcast_to(beside_ms, count),
        np.zeros(count) if beside_slabs is None else beside_slabs,
    )
    most = int(np.maximum(blocks.hidden_slabs, blocks.kv_slabs).sum())
    gone, live = np.full(most + 1, np.inf), np.full(most + 1, np.inf)
    gone[0] = 0.0
    arrival = link.busy_ms + link.slab_ms * np.arange(most + 1)
    choices: list[_Backpointers] = []
    for index, others in enumerate(np.cumsum(waiting).tolist()):
        fresh, hidden_slabs, kv_slabs = blocks.fresh[index], *_slabs(blocks, index)
        there, waits = arrival + others * link.slab_ms, waiting[index] > 0
        # Six ways: into GONE by keys and values from either state, or by the hidden state of either; into LIVE by
        # computing everything from either.
        at_hand = np.maximum(live, there) if waits else live
        fetched = gone if fresh else _shifted(gone, hidden_slabs)
        if waits or (hidden_slabs and not fresh):
            fetched = np.maximum(fetched, there)
        if not (fresh or blocks.hidden_kept[index]):
            fetched = np.full_like(fetched, np.inf)
        kv = _shifted(np.minimum(gone, live), kv_slabs)
        if waits or kv_slabs:
            kv = np.maximum(kv, there)
        kv = kv + (blocks.kv_ms[index] + beside[index] if blocks.kv_kept[index] else np.inf)
        hidden = np.minimum(fetched, at_hand)
        projected = hidden + blocks.hidden_ms[index] + beside[index]
        choices.append(_Backpointers(kv <= projected, at_hand <= fetched, gone < live))
        gone, live = np.minimum(kv, projected), hidden + blocks.full_ms[index] + beside[index]
    return _traced(blocks, gone, live, choices)


def _slabs(blocks: RowBlocks, index: int) -> tuple[int, int]:
    return int(blocks.hidden_slabs[index]), int(blocks.kv_slabs[index])


def _shifted(times: Array, slabs: int) -> Array:
    """The times after loading `slabs` more."""
    if not slabs:
        return times
    moved = np.full_like(times, np.inf)
    moved[slabs:] = times[:-slabs]
    return moved


def _traced(blocks: RowBlocks, gone: Array, live: Array, choices: Sequence[_Backpointers]) -> Modes:
    slabs = int(np.minimum(gone, live).argmin())
    is_live = bool(live[slabs] <= gone[slabs])
    modes: list[BlockMode] = []
    for index, chosen in zip(reversed(range(len(blocks))), reversed(choices), strict=True):
        mode = BlockMode.FULL if is_live else BlockMode.KV if chosen.by_kv[slabs] else BlockMode.HIDDEN
        modes.append(mode)
        hidden_slabs, kv_slabs = _slabs(blocks, index)
        if mode is BlockMode.KV:
            slabs -= kv_slabs
            is_live = not chosen.gone_first[slabs]
        else:
            is_live = bool(chosen.from_live[slabs])
            slabs -= 0 if is_live or blocks.fresh[index] else hidden_slabs
    return tuple(reversed(modes))


def greedy_modes(blocks: RowBlocks, link: LoadLink, beside_ms: Beside = 0.0) -> Modes:
    """Algorithm 1 of FlashPS, with a third mode: each block takes what ends first, the cache on a tie."""
    modes: list[BlockMode] = []
    beside = np.broadcast_to(beside_ms, len(blocks))
    slabs, now, live = 0, 0.0, False
    for index in range(len(blocks)):
        hidden_slabs, kv_slabs = _slabs(blocks, index)
        live = live or bool(blocks.fresh[index])
        hidden, lost_ms = 0 if live else hidden_slabs, 0.0 if live or blocks.hidden_kept[index] else math.inf
        options = [
            (BlockMode.KV, kv_slabs, blocks.kv_ms[index] if blocks.kv_kept[index] else math.inf),
            (BlockMode.HIDDEN, hidden, blocks.hidden_ms[index] + lost_ms),
            (BlockMode.FULL, hidden, blocks.full_ms[index] + lost_ms),
        ]
        ends = [
            max(now, link.busy_ms + (slabs + more) * link.slab_ms if more else 0.0) + ms + beside[index]
            for _, more, ms in options
        ]
        now = min(ends)
        mode, more, _ = options[ends.index(now)]
        slabs, live = slabs + more, mode is BlockMode.FULL
        modes.append(mode)
    return tuple(modes)


# Rows that keep no hidden states: each step is computed in full up to a block, then from the cache.


@dataclass(frozen=True, eq=False)
class PrefixPlanBatch:
    """Rows whose windows have the same steps. Arrays are (rows, steps, blocks a step).

    Candidate c of a step of n blocks: for c <= n, c blocks in full and the others from the cache; else c - n - 1 in
    full, one projected from the hidden state, the others from the cache.
    """

    full_ms: Array
    hidden_ms: Array
    kv_ms: Array
    """As `full_ms` before the first block from which on keys and values are kept."""
    kv_slabs: Array
    least: Counts
    """(rows, steps): the first block from which on all keep keys and values."""
    members: tuple[list[int], ...]
    """The rows of each template; those of one load each entry once together."""

    @property
    def blocks(self) -> int:
        """Blocks of a step."""
        blocks: int = self.full_ms.shape[2]
        return blocks

    @property
    def cheapest(self) -> tuple[Modes, ...]:
        """All from the cache that is kept."""
        return self.modes(self.least)

    def modes(self, chosen: Counts) -> tuple[Modes, ...]:
        """Each row's modes, by (rows, steps) candidates."""
        return tuple(
            tuple(chain.from_iterable(_of_candidate(self.blocks, one) for one in row))
            for row in chosen.tolist()
        )

    @cached_property
    def cached_from(self) -> Counts:
        """(candidates,): the block from which on each takes from the cache."""
        return np.concatenate((np.arange(self.blocks + 1), np.arange(1, self.blocks + 1)))

    @cached_property
    def sooner_full_ms(self) -> Array:
        """All before each block, and all there are, computed in full."""
        return _summed(self.full_ms)

    @cached_property
    def later_kv_ms(self) -> Array:
        """Each block and all behind it from the cache, and 0."""
        sums = _summed(self.kv_ms)
        return sums[..., -1:] - sums

    @cached_property
    def own_ms(self) -> Array:
        """(rows, steps, candidates): what the row itself computes."""
        full, kv = self.sooner_full_ms, self.later_kv_ms
        return np.concatenate((full + kv, full[..., :-1] + self.hidden_ms + kv[..., 1:]), axis=-1)

    @cached_property
    def possible_ms(self) -> Array:
        """The same; infinite where a block would take what is not kept."""
        return np.where(self.cached_from < self.least[..., np.newaxis], np.inf, self.own_ms)


def prefix_batch(rows: Sequence[BatchRow]) -> PrefixPlanBatch | None:
    """The rows, if each keeps no hidden state, and they share a window of one or two steps; else None.

    Each takes from the cache only behind the last block that keeps no keys and values.
    """
    fresh = rows[0].blocks.fresh
    begins = np.flatnonzero(fresh).tolist()
    steps, count = len(begins), len(fresh)
    if steps not in (1, 2) or begins != [step * count // steps for step in range(steps)] or count % steps:
        return None
    if any(((row.blocks.fresh != fresh) | (row.blocks.hidden_kept & ~fresh)).any() for row in rows):
        return None
    shape = (len(rows), steps, count // steps)
    full, hidden, kv, slabs, kept = (
        np.array([getattr(row.blocks, name) for row in rows]).reshape(shape)
        for name in ("full_ms", "hidden_ms", "kv_ms", "kv_slabs", "kv_kept")
    )
    kept = np.logical_and.accumulate(kept[..., ::-1], axis=2)[..., ::-1]
    kv, slabs = np.where(kept, kv, full), np.where(kept, slabs, 0.0)
    members = _members((row.template, index) for index, row in enumerate(rows))
    return PrefixPlanBatch(full, hidden, kv, slabs, (~kept).sum(axis=2), members)


class StepPlanCandidates(NamedTuple):
    """All plans of one step of a row beside the others; each is (..., candidates)."""

    computing_ms: Array
    """Computing time of all rows in the step; infinite where a block would take what is not kept."""
    waiting_ms: Array
    """From the link's first slab of the step to the step's end if computing only waits for loads; -inf for none."""
    slabs: Array
    """That all rows load in the step."""


def plan_prefixes(of: PrefixPlanBatch, link: LoadLink, base_ms: float) -> tuple[Modes, ...]:
    """The modes of every row: the best there are for one row; for several, no other step of one row alone is better.

    Several rows are planned from two beginnings: all from the cache, and each step of each row as if it were alone.
    """
    alone = scanned(of, None, link, base_ms)
    if len(of.full_ms) == 1:
        return of.modes(_of_window(alone, link))
    ended = np.maximum(alone.computing_ms, link.busy_ms + alone.waiting_ms)
    return of.modes(_descended(of, np.stack((of.least, _first(ended, alone.slabs))), link, base_ms))


def _of_candidate(blocks: int, candidate: int) -> Modes:
    if candidate <= blocks:
        return (BlockMode.FULL,) * candidate + (BlockMode.KV,) * (blocks - candidate)
    full = candidate - blocks - 1
    return (*(BlockMode.FULL,) * full, BlockMode.HIDDEN, *(BlockMode.KV,) * (blocks - full - 1))


def _summed(values: Array) -> Array:
    """Sums up to each block, from 0 to the whole: one more than there are blocks."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def scanned(of: PrefixPlanBatch, chosen: Counts | None, link: LoadLink, base_ms: float) -> StepPlanCandidates:
    """Every candidate of every row and step, while the other rows do what is `chosen`, (..., rows, steps).

    Without it, there are no others. Each of the result is (..., rows, steps, candidates).
    """
    n, own_slabs = of.blocks, of.kv_slabs
    others_ms: Array = np.full_like(of.full_ms, base_ms)
    others_slabs: Array = np.zeros_like(of.full_ms)
    if chosen is not None:
        computing, loading = _prefixes_taken(of, chosen)
        others_ms = base_ms + computing.sum(axis=-3, keepdims=True) - computing
        others_slabs, own_slabs = _loaded_beside(of, loading)
    slabs = _summed(own_slabs)
    after_ms = np.cumsum(others_ms[..., ::-1], axis=-1)[..., ::-1]
    arrived_ms = link.slab_ms * np.cumsum(others_slabs, axis=-1)
    # Waits of blocks behind the change, and of blocks before it that others load for.
    behind = arrived_ms + link.slab_ms * slabs[..., 1:] + of.later_kv_ms[..., :-1] + after_ms
    behind[others_slabs + own_slabs <= 0] = -np.inf
    before = arrived_ms - of.sooner_full_ms[..., :-1] + after_ms
    before[others_slabs <= 0] = -np.inf
    waiting = np.full((*behind.shape[:-1], 2 * n + 1), -np.inf)
    np.maximum.accumulate(behind[..., ::-1], axis=-1, out=waiting[..., n - 1 :: -1])
    waiting[..., : n + 1] -= link.slab_ms * slabs
    waiting[..., n + 1 :] = waiting[..., 1 : n + 1]
    before = np.maximum.accumulate(before, axis=-1)
    np.maximum(waiting[..., 1 : n + 1], before + of.own_ms[..., 1 : n + 1], out=waiting[..., 1 : n + 1])
    np.maximum(waiting[..., n + 1 :], before + of.own_ms[..., n + 1 :], out=waiting[..., n + 1 :])
    loaded = (slabs[..., -1:] + others_slabs.sum(axis=-1, keepdims=True)) - slabs[..., of.cached_from]
    return StepPlanCandidates(of.possible_ms + after_ms[..., :1], waiting, loaded)


def _prefixes_taken(of: PrefixPlanBatch, chosen: Counts) -> tuple[Array, Array]:
    """Return what each row computes, in ms, and loads, in slabs, by block."""
    index, begins = np.arange(of.blocks), of.cached_from[chosen][..., np.newaxis]
    computing = np.where(index < begins, of.full_ms, of.kv_ms)
    projects = (chosen > of.blocks)[..., np.newaxis] & (index == begins - 1)
    computing = np.where(projects, of.hidden_ms, computing)
    return computing, np.where(index < begins, 0.0, of.kv_slabs)


def _loaded_beside(of: PrefixPlanBatch, loading: Array) -> tuple[Array, Array]:
    """What the others load beside each row, and what it would add: what it loads beyond the rest of its group."""
    if len(of.members) == len(of.full_ms):
        return loading.sum(axis=-3, keepdims=True) - loading, of.kv_slabs
    others, own = np.zeros_like(loading), np.broadcast_to(of.kv_slabs, loading.shape).copy()
    together = np.zeros_like(loading[..., :1, :, :])
    for rows in of.members:
        loads = loading[..., rows, :, :]
        ranked = np.sort(loads, axis=-3)
        most, next_most = ranked[..., -1:, :, :], ranked[..., -2:-1, :, :] if len(rows) > 1 else 0.0
        together += most
        rest = np.where(loads < most, most, next_most)
        others[..., rows, :, :] = rest - most
        own[..., rows, :, :] = np.maximum(own[..., rows, :, :] - rest, 0.0)
    return others + together, own


def _of_window(alone: StepPlanCandidates, link: LoadLink) -> Counts:
    """The best candidates, (1, steps), for the one row there is."""
    first, last = (StepPlanCandidates(*(column[0, step] for column in alone)) for step in (0, -1))
    ended, slabs = np.maximum(first.computing_ms, link.busy_ms + first.waiting_ms), first.slabs
    if alone.slabs.shape[1] == 1:
        return _first(ended, slabs)[np.newaxis, np.newaxis]
    ended = np.maximum(
        ended[:, np.newaxis] + last.computing_ms,
        (link.busy_ms + link.slab_ms * slabs)[:, np.newaxis] + last.waiting_ms,
    )
    slabs = slabs[:, np.newaxis] + last.slabs
    return np.array([np.unravel_index(_first(ended.ravel(), slabs.ravel()), slabs.shape)])


def _first(ended_ms: Array, slabs: Array) -> Counts:
    """Index of the earliest end along the last axis; among equals, of the one that loads least."""
    soon = ended_ms <= ended_ms.min(axis=-1, keepdims=True) * (1 + EQUAL)
    index: Counts = np.where(soon, slabs, np.inf).argmin(axis=-1)
    return index


def _descended(of: PrefixPlanBatch, plans: Counts, link: LoadLink, base_ms: float) -> Counts:
    """The best of several `plans`, (plans, rows, steps), each improved by the best change of one step of one row.

    All are improved side by side, until none can be.
    """
    plans, each = plans.copy(), np.arange(len(plans))
    for _ in range(MOVES):
        ended, slabs = _windows(scanned(of, plans, link, base_ms), plans, link)
        now, slabs_now = (
            np.take_along_axis(v[:, 0, 0], plans[:, :1, 0], axis=-1)[:, 0] for v in (ended, slabs)
        )
        places = _first(ended.reshape(len(plans), -1), slabs.reshape(len(plans), -1))
        then = ended.reshape(len(plans), -1)[each, places]
        better = then < now * (1 - WORTH)
        if not better.any():
            break
        row, step, candidate = np.unravel_index(places, ended.shape[1:])
        plans[each[better], row[better], step[better]] = candidate[better]
    best: Counts = plans[_first(now, slabs_now)]
    return best


def _windows(found: StepPlanCandidates, plans: Counts, link: LoadLink) -> tuple[Array, Array]:
    """Return when the window ends with each candidate in place of the planned one, and what it loads.

    Each is (plans, rows, steps, candidates).
    """
    busy, slab = link.busy_ms, link.slab_ms
    ended = np.maximum(found.computing_ms, busy + found.waiting_ms)
    if plans.shape[2] == 1:
        return ended, found.slabs
    # What the batch does as planned is told by any row's candidates: by the first one's.
    planned_, each = plans[:, 0, :, np.newaxis], (slice(None), 0)
    computing, waiting, slabs, ending = (
        np.take_along_axis(v[each], planned_, axis=-1)[..., np.newaxis] for v in (*found, ended)
    )
    ended = np.stack(
        (
            np.maximum(ended[:, :, 0] + computing[:, 1], busy + slab * found.slabs[:, :, 0] + waiting[:, 1]),
            np.maximum(
                ending[:, 0] + found.computing_ms[:, :, 1],
                busy + slab * slabs[:, 0] + found.waiting_ms[:, :, 1],
            ),
        ),
        axis=2,
    )
    return ended, found.slabs + slabs[:, np.newaxis, ::-1, :, 0]
