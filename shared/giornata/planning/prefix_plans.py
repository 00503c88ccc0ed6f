"""Plans of rows that keep no hidden states: each step is computed in full up to a block, then from the cache. Pure.

Once a row has taken keys and values, the outside tokens' hidden state is gone for the rest of the step, and such a row
has none to load. So a step has few plans: so many blocks in full, then keys and values; between the two, at most one
block may project keys and values from the hidden state that is still at hand. `scanned` times all of them at once. The
end of a step is the latest of its computing and, for each block that waits for a load, of that load's arrival and all
computing from there on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from giornata.planning.block_plans import BlockCostColumns, LoadLink, Modes
from giornata.wire.values import BlockMode

Numbers = NDArray[np.float64]
Steps = NDArray[np.int64]
"""(rows, steps): an index of a candidate each."""
MOVES: Final = 12
"""Most improvements of a batch's plan."""
WORTH: Final = 1e-3
"""Share of a window that an improvement of a batch's plan has to save: finding it takes time too."""
EQUAL: Final = 1e-9
"""Share of its time by which a plan has to be better: less is rounding."""


@dataclass(frozen=True, eq=False)
class PrefixPlanBatch:
    """Rows whose windows have the same steps.

    Candidate c of a step of n blocks: for c <= n, c blocks in full and the others from the cache; else c - n - 1 in
    full, one projected from the hidden state, the others from the cache. Arrays are (rows, steps, blocks a step).
    """

    full_ms: Numbers
    hidden_ms: Numbers
    kv_ms: Numbers
    """As `full_ms` before the first block from which on keys and values are kept."""
    kv_slabs: Numbers
    least: Steps
    """First block from which on all keep keys and values."""
    members: tuple[list[int], ...]
    """The rows of each group; those of one group load each entry once together."""

    @property
    def blocks(self) -> int:
        """Blocks of a step."""
        blocks: int = self.full_ms.shape[2]
        return blocks

    @cached_property
    def cached_from(self) -> Steps:
        """(candidates,): the block from which on each takes from the cache."""
        return np.concatenate((np.arange(self.blocks + 1), np.arange(1, self.blocks + 1)))

    @cached_property
    def sooner_full_ms(self) -> Numbers:
        """All before each block, and all there are, computed in full."""
        return _summed(self.full_ms)

    @cached_property
    def later_kv_ms(self) -> Numbers:
        """Each block and all behind it from the cache, and 0."""
        sums = _summed(self.kv_ms)
        return sums[..., -1:] - sums

    @cached_property
    def own_ms(self) -> Numbers:
        """(rows, steps, candidates): what the row itself computes."""
        full, kv = self.sooner_full_ms, self.later_kv_ms
        return np.concatenate((full + kv, full[..., :-1] + self.hidden_ms + kv[..., 1:]), axis=-1)

    @cached_property
    def possible_ms(self) -> Numbers:
        """The same; infinite where a block would take what is not kept."""
        return np.where(self.cached_from < self.least[..., np.newaxis], np.inf, self.own_ms)


def prefix_batch(rows: Sequence[BlockCostColumns], groups: Sequence[Hashable]) -> PrefixPlanBatch | None:
    """The rows, if each keeps no hidden state, and they share a window of one or two steps; else None.

    Each takes from the cache only behind the last block that keeps no keys and values.
    """
    fresh = rows[0].fresh
    begins = np.flatnonzero(fresh).tolist()
    steps, count = len(begins), len(fresh)
    if steps not in (1, 2) or begins != [step * count // steps for step in range(steps)] or count % steps:
        return None
    if (np.array([(row.fresh != fresh) | (row.hidden_kept & ~fresh) for row in rows])).any():
        return None
    shape = (len(rows), steps, count // steps)
    full, hidden, kv, slabs, kept = (
        np.array([getattr(row, name) for row in rows]).reshape(shape)
        for name in ("full_ms", "hidden_ms", "kv_ms", "kv_slabs", "kv_kept")
    )
    kept = np.logical_and.accumulate(kept[..., ::-1], axis=2)[..., ::-1]
    kv, slabs = np.where(kept, kv, full), np.where(kept, slabs, 0.0)
    return PrefixPlanBatch(full, hidden, kv, slabs, (~kept).sum(axis=2), _members(groups))


def _members(groups: Sequence[Hashable]) -> tuple[list[int], ...]:
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return tuple(members.values())


class StepPlanCandidates(NamedTuple):
    """All plans of one step of a row beside the others; each is (..., candidates)."""

    computing_ms: Numbers
    """Computing time of all rows in the step; infinite where a block would take what is not kept."""
    waiting_ms: Numbers
    """From the link's first slab of the step to the step's end if computing only waits for loads; -inf for none."""
    slabs: Numbers
    """That all rows load in the step."""


def plan_prefixes(of: PrefixPlanBatch, link: LoadLink, base_ms: float) -> tuple[Modes, ...]:
    """The modes of every row: the best there are for one row; for several, no other step of one row alone is better.

    Several rows are planned from two beginnings: all from the cache, and each step of each row as if it were alone.
    """
    alone = scanned(of, None, link, base_ms)
    if len(of.full_ms) == 1:
        return _spelled(of, _of_window(alone, link))
    ended = np.maximum(alone.computing_ms, link.busy_ms + alone.waiting_ms)
    chosen = _descended(of, np.stack((of.least, _first(ended, alone.slabs))), link, base_ms)
    return _spelled(of, chosen)


def cheapest(of: PrefixPlanBatch) -> tuple[Modes, ...]:
    """All from the cache that is kept."""
    return _spelled(of, of.least)


def _spelled(of: PrefixPlanBatch, chosen: Steps) -> tuple[Modes, ...]:
    return tuple(tuple(chain.from_iterable(_modes(of.blocks, c) for c in row)) for row in chosen.tolist())


def _modes(blocks: int, candidate: int) -> Modes:
    if candidate <= blocks:
        return (BlockMode.FULL,) * candidate + (BlockMode.KV,) * (blocks - candidate)
    full = candidate - blocks - 1
    return (*(BlockMode.FULL,) * full, BlockMode.HIDDEN, *(BlockMode.KV,) * (blocks - full - 1))


def _summed(values: Numbers) -> Numbers:
    """Sums up to each block, from 0 to the whole: one more than there are blocks."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def scanned(of: PrefixPlanBatch, chosen: Steps | None, link: LoadLink, base_ms: float) -> StepPlanCandidates:
    """Every candidate of every row and step, while the other rows do what is `chosen`, (..., rows, steps).

    Without it, there are no others. Each of the result is (..., rows, steps, candidates).
    """
    n, own_slabs = of.blocks, of.kv_slabs
    others_ms: Numbers = np.full_like(of.full_ms, base_ms)
    others_slabs: Numbers = np.zeros_like(of.full_ms)
    if chosen is not None:
        computing, loading = _taken(of, chosen)
        others_ms = base_ms + computing.sum(axis=-3, keepdims=True) - computing
        others_slabs, own_slabs = _beside(of, loading)
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


def _taken(of: PrefixPlanBatch, chosen: Steps) -> tuple[Numbers, Numbers]:
    """Return what each row computes, in ms, and loads, in slabs, by block."""
    index, begins = np.arange(of.blocks), of.cached_from[chosen][..., np.newaxis]
    computing = np.where(index < begins, of.full_ms, of.kv_ms)
    projects = (chosen > of.blocks)[..., np.newaxis] & (index == begins - 1)
    computing = np.where(projects, of.hidden_ms, computing)
    return computing, np.where(index < begins, 0.0, of.kv_slabs)


def _beside(of: PrefixPlanBatch, loading: Numbers) -> tuple[Numbers, Numbers]:
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


def _of_window(alone: StepPlanCandidates, link: LoadLink) -> Steps:
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


def _first(ended_ms: Numbers, slabs: Numbers) -> Steps:
    """Index of the earliest end along the last axis; among equals, of the one that loads least."""
    soon = ended_ms <= ended_ms.min(axis=-1, keepdims=True) * (1 + EQUAL)
    index: Steps = np.where(soon, slabs, np.inf).argmin(axis=-1)
    return index


def _descended(of: PrefixPlanBatch, plans: Steps, link: LoadLink, base_ms: float) -> Steps:
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
    best: Steps = plans[_first(now, slabs_now)]
    return best


def _windows(found: StepPlanCandidates, plans: Steps, link: LoadLink) -> tuple[Numbers, Numbers]:
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
