"""Plans of rows that share one forward and one link: each row's is exact, given the others'. Pure.

All rows meet at every block, so that a row's best plan depends on the others'. The joint optimum has 3^(rows * blocks)
candidates; `plan_batch` improves one row at a time, from several beginnings, until no row can improve alone. Rows that
keep no hidden states have few plans each, which :mod:`giornata.planning.prefix_plans` times all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata.planning.block_plans import (
    MODES,
    BlockCost,
    BlockCostColumns,
    BlockTimeline,
    Flags,
    LoadLink,
    Modes,
    Planner,
    Times,
    exact_modes,
    uniform_modes,
)
from giornata.planning.prefix_plans import cheapest, plan_prefixes, prefix_batch
from giornata.wire.values import BlockMode

ROUNDS: Final = 4
"""Most rounds over all rows; a round that improves nothing is the last."""
BEGINNINGS: Final = (uniform_modes(BlockMode.KV), exact_modes)
CODES: Final = {mode: code for code, mode in enumerate(MODES)}


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch at the planner; all rows have the same number of blocks."""

    blocks: Sequence[BlockCost]
    """What the row costs alone; `others_ms` is 0."""
    template: Hashable
    """Rows of one template load each entry once together."""

    @cached_property
    def columns(self) -> BlockCostColumns:
        """The same blocks."""
        return BlockCostColumns.of(self.blocks)


@dataclass(frozen=True)
class BatchPlan:
    """A plan of every row."""

    modes: tuple[Modes, ...]
    timeline: BlockTimeline


BatchPlanner = Callable[[Sequence[BatchRow], LoadLink, float], BatchPlan]
"""Finds modes for every row; the last argument is the time that every block takes besides, in ms."""


def plan_batch(rows: Sequence[BatchRow], link: LoadLink, base_ms: float = 0.0) -> BatchPlan:
    """Modes for every row, by coordinate descent over exact plans; the exact plan where there is one row.

    Where taking keys and values from the cache waits for nothing, nothing is faster, and nothing else is tried.
    `base_ms` is the time of every block beside these rows: rows without a template, and the base of a block.

    Raises:
        ValueError: rows differ in their number of blocks.
    """
    if len({len(row.blocks) for row in rows}) > 1:
        raise ValueError(f"rows have {[len(row.blocks) for row in rows]} blocks; all need as many")
    rows_of_few_plans = prefix_batch([row.columns for row in rows], [row.template for row in rows])
    if rows_of_few_plans is not None:
        plan = evaluate_modes(rows, cheapest(rows_of_few_plans), link, base_ms)
        if plan.timeline.waits or not _cheapest(rows, plan.modes):
            plan = evaluate_modes(rows, plan_prefixes(rows_of_few_plans, link, base_ms), link, base_ms)
        return plan
    plans: list[BatchPlan] = []
    for beginning in BEGINNINGS:
        modes = [beginning(row.blocks, link) for row in rows]
        plan = evaluate_modes(rows, modes, link, base_ms)
        if math.isfinite(plan.timeline.finish_ms) and not plan.timeline.waits and _cheapest(rows, modes):
            return plan
        plans.append(_improved(rows, plan, link, base_ms) if len(rows) > 1 or base_ms else plan)
    return min(plans, key=_rank)


def plan_each_alone(planner: Planner) -> BatchPlanner:
    """A planner of every row alone; `plan_batch` where its plan takes an entry that the template does not keep."""

    def planned(rows: Sequence[BatchRow], link: LoadLink, base_ms: float) -> BatchPlan:
        alone = [_given(row, [(0.0, {})] * len(row.blocks), base_ms) for row in rows]
        plan = evaluate_modes(rows, [planner(blocks, link) for blocks in alone], link, base_ms)
        return plan if math.isfinite(plan.timeline.finish_ms) else plan_batch(rows, link, base_ms)

    return planned


def evaluate_modes(
    rows: Sequence[BatchRow], modes: Sequence[Modes], link: LoadLink, base_ms: float = 0.0
) -> BatchPlan:
    """The plan of a batch with these `modes`: a block of all rows begins when each has what its mode takes.

    Raises:
        ValueError: not one mode for every block of every row.
    """
    for row, chosen in zip(rows, modes, strict=True):
        if len(row.blocks) != len(chosen):
            raise ValueError(f"received {len(chosen)} modes for {len(row.blocks)} blocks")
    computing, slabs = _together(rows, modes)
    # A block ends when all from the start, or from one that waited for its load, has been computed one after the other.
    ended = np.cumsum(computing + base_ms)
    begun = np.concatenate(((0.0,), ended[:-1]))
    there = np.where(slabs > 0, link.busy_ms + np.cumsum(slabs) * link.slab_ms, 0.0)
    with np.errstate(invalid="ignore"):  # what never ends is never later
        late = np.maximum.accumulate(np.where(np.isfinite(begun), there - begun, 0.0))
    before = np.concatenate(((0.0,), np.maximum(late, 0.0)[:-1]))
    waits = bool((late > before + 1e-12 * np.maximum(1.0, begun)).any())
    ends = (ended + np.maximum(late, 0.0)).tolist()
    return BatchPlan(tuple(modes), BlockTimeline(tuple(ends), int(slabs.sum()), waits))


def _together(rows: Sequence[BatchRow], modes: Sequence[Modes]) -> tuple[Times, Times]:
    """Return what all rows compute, in ms, and load, in slabs, by block; an entry of rows of one template once."""
    columns = [row.columns for row in rows]

    def of_all(name: str) -> Times:
        return np.array([getattr(row, name) for row in columns])

    mode = np.array([_codes(tuple(chosen)) for chosen in modes])
    kv, full = mode == CODES[BlockMode.KV], mode == CODES[BlockMode.FULL]
    live: Flags = of_all("fresh").astype(bool)
    live[:, 1:] |= full[:, :-1]
    computing = np.where(kv, of_all("kv_ms"), np.where(full, of_all("full_ms"), of_all("hidden_ms")))
    found = np.where(kv, of_all("kv_kept"), live | of_all("hidden_kept").astype(bool)).astype(bool)
    own = np.where(kv, of_all("kv_slabs"), np.where(live, 0.0, of_all("hidden_slabs")))
    computing[~found] = np.inf
    by_template: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        by_template.setdefault(row.template, []).append(index)
    if len(by_template) == len(rows):
        return computing.sum(axis=0), own.sum(axis=0)
    slabs = np.zeros_like(own[0])
    for members in by_template.values():
        for form in (kv, ~kv):
            slabs += np.where(form[members], own[members], 0.0).max(axis=0)
    return computing.sum(axis=0), slabs


@lru_cache(maxsize=1024)
def _codes(modes: Modes) -> NDArray[np.int8]:
    return np.array([CODES[mode] for mode in modes], np.int8)


def _improved(rows: Sequence[BatchRow], best: BatchPlan, link: LoadLink, base_ms: float) -> BatchPlan:
    for _ in range(ROUNDS):
        before = best
        for index, row in enumerate(rows):
            candidate = list(best.modes)
            candidate[index] = exact_modes(_given(row, _beside(rows, best.modes, index), base_ms), link)
            plan = evaluate_modes(rows, candidate, link, base_ms)
            if _rank(plan) < _rank(best):
                best = plan
        if best is before:
            break
    return best


def _cheapest(rows: Sequence[BatchRow], modes: Sequence[Modes]) -> bool:
    """Return whether no block could compute less than it does."""
    return all(
        chosen.count(BlockMode.KV) == len(chosen)
        and bool((row.columns.kv_ms <= np.minimum(row.columns.hidden_ms, row.columns.full_ms)).all())
        for row, chosen in zip(rows, modes, strict=True)
    )


def _rank(plan: BatchPlan) -> tuple[float, int]:
    return plan.timeline.finish_ms, plan.timeline.slabs


Entries = dict[tuple[Hashable, BlockMode], int]
"""Slabs by template and form: `HIDDEN` for the hidden state, which two modes read, and `KV`."""


def _beside(
    rows: Sequence[BatchRow], modes: Sequence[Modes], left_out: int | None
) -> list[tuple[float, Entries]]:
    """Return what all rows but one compute, in ms, and load, block by block."""
    sums: list[tuple[float, Entries]] = [(0.0, {}) for _ in rows[0].blocks]
    for index, (row, chosen) in enumerate(zip(rows, modes, strict=True)):
        if index == left_out:
            continue
        live = False
        for place, (block, mode) in enumerate(zip(row.blocks, chosen, strict=True)):
            ms, entries = sums[place]
            if slabs := block.slabs(mode, live=live):
                entries[row.template, BlockMode.KV if mode is BlockMode.KV else BlockMode.HIDDEN] = slabs
            sums[place] = ms + block.compute_ms(mode, live=live), entries
            live = mode is BlockMode.FULL
    return sums


def _given(row: BatchRow, others: Sequence[tuple[float, Entries]], base_ms: float) -> list[BlockCost]:
    """The row's blocks beside the others': an entry of its template that they load costs it nothing."""
    return [
        replace(
            block,
            hidden_slabs=0 if (row.template, BlockMode.HIDDEN) in entries else block.hidden_slabs,
            kv_slabs=0 if (row.template, BlockMode.KV) in entries else block.kv_slabs,
            others_ms=base_ms + ms,
            others_slabs=sum(entries.values()),
        )
        for block, (ms, entries) in zip(row.blocks, others, strict=True)
    ]
