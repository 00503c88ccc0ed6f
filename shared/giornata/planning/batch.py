"""Plans of rows that share one forward and one link: each row's is exact, given the others'. Pure.

All rows meet at every block, so that a row's best plan depends on the others'. The joint optimum has 3^(rows * blocks)
candidates; `plan_batch` improves one row at a time, from several beginnings, until no row can improve alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from giornata.planning.blocks import Block, Link, Modes, Planner, Timeline, always, exact, greedy, timeline
from giornata.wire.values import Mode

ROUNDS: Final = 4
"""Most rounds over all rows; a round that improves nothing is the last."""
BEGINNINGS: Final = (always(Mode.KV), exact)


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch at the planner; all rows have the same number of blocks."""

    blocks: tuple[Block, ...]
    """What the row costs alone; `others_ms` is 0."""
    template: Hashable
    """Rows of one template load each entry once together."""


@dataclass(frozen=True)
class BatchPlan:
    """A plan of every row."""

    modes: tuple[Modes, ...]
    timeline: Timeline


BatchPlanner = Callable[[Sequence[BatchRow], Link, float], BatchPlan]
"""Finds modes for every row; the last argument is the time that every block takes besides, in ms."""


def plan_batch(rows: Sequence[BatchRow], link: Link, base_ms: float = 0.0) -> BatchPlan:
    """Modes for every row, by coordinate descent over exact plans; the exact plan where there is one row.

    Where taking keys and values from the cache waits for nothing, nothing is faster, and nothing else is tried.
    `base_ms` is the time of every block beside these rows: rows without a template, and the base of a block.

    Raises:
        ValueError: rows differ in their number of blocks.
    """
    if len({len(row.blocks) for row in rows}) > 1:
        raise ValueError(f"rows have {[len(row.blocks) for row in rows]} blocks; all need as many")
    plans: list[BatchPlan] = []
    for beginning in BEGINNINGS:
        modes = [beginning(row.blocks, link) for row in rows]
        plan = evaluate(rows, modes, link, base_ms)
        if math.isfinite(plan.timeline.finish_ms) and not plan.timeline.waits and _cheapest(rows, modes):
            return plan
        plans.append(_improved(rows, plan, link, base_ms) if len(rows) > 1 or base_ms else plan)
    return min(plans, key=_rank)


def each(planner: Planner) -> BatchPlanner:
    """A planner of every row alone; `plan_batch` where its plan takes an entry that the template does not keep."""

    def planned(rows: Sequence[BatchRow], link: Link, base_ms: float) -> BatchPlan:
        alone = [_given(row, [(0.0, {})] * len(row.blocks), base_ms) for row in rows]
        plan = evaluate(rows, [planner(blocks, link) for blocks in alone], link, base_ms)
        return plan if math.isfinite(plan.timeline.finish_ms) else plan_batch(rows, link, base_ms)

    return planned


class PlannerName(StrEnum):
    """What a planner is called in configurations and benchmarks."""

    EXACT = "exact"
    """:func:`plan_batch`."""
    GREEDY = "greedy"
    """Algorithm 1 of FlashPS."""
    KV = "kv"
    """Everything from the cache: FlashPS's strawman loading (figure 9)."""
    HIDDEN = "hidden"
    """Everything from the cache, as inputs that are projected again."""
    FULL = "full"
    """No reuse."""


PLANNERS: Final[Mapping[PlannerName, BatchPlanner]] = MappingProxyType(
    {
        PlannerName.EXACT: plan_batch,
        PlannerName.GREEDY: each(greedy),
        PlannerName.KV: each(always(Mode.KV)),
        PlannerName.HIDDEN: each(always(Mode.HIDDEN)),
        PlannerName.FULL: each(always(Mode.FULL)),
    }
)


def evaluate(rows: Sequence[BatchRow], modes: Sequence[Modes], link: Link, base_ms: float = 0.0) -> BatchPlan:
    """The plan of a batch with these `modes`."""
    merged = [
        Block(0.0, 0.0, 0.0, 0, 0, fresh=True, others_ms=base_ms + ms, others_slabs=sum(entries.values()))
        for ms, entries in _beside(rows, modes, None)
    ]
    return BatchPlan(tuple(modes), timeline(merged, (Mode.FULL,) * len(merged), link))


def _improved(rows: Sequence[BatchRow], best: BatchPlan, link: Link, base_ms: float) -> BatchPlan:
    for _ in range(ROUNDS):
        before = best
        for index, row in enumerate(rows):
            candidate = list(best.modes)
            candidate[index] = exact(_given(row, _beside(rows, best.modes, index), base_ms), link)
            plan = evaluate(rows, candidate, link, base_ms)
            if _rank(plan) < _rank(best):
                best = plan
        if best is before:
            break
    return best


def _cheapest(rows: Sequence[BatchRow], modes: Sequence[Modes]) -> bool:
    """Whether no block could compute less than it does."""
    return all(
        mode is Mode.KV and block.kv_ms <= min(block.hidden_ms, block.full_ms)
        for row, chosen in zip(rows, modes, strict=True)
        for block, mode in zip(row.blocks, chosen, strict=True)
    )


def _rank(plan: BatchPlan) -> tuple[float, int]:
    return plan.timeline.finish_ms, plan.timeline.slabs


Entries = dict[tuple[Hashable, Mode], int]
"""Slabs by template and form: `HIDDEN` for the hidden state, which two modes read, and `KV`."""


def _beside(
    rows: Sequence[BatchRow], modes: Sequence[Modes], left_out: int | None
) -> list[tuple[float, Entries]]:
    """What all rows but one compute, in ms, and load, block by block."""
    sums: list[tuple[float, Entries]] = [(0.0, {}) for _ in rows[0].blocks]
    for index, (row, chosen) in enumerate(zip(rows, modes, strict=True)):
        if index == left_out:
            continue
        live = False
        for place, (block, mode) in enumerate(zip(row.blocks, chosen, strict=True)):
            ms, entries = sums[place]
            if slabs := block.slabs(mode, live=live):
                entries[row.template, Mode.KV if mode is Mode.KV else Mode.HIDDEN] = slabs
            sums[place] = ms + block.compute_ms(mode, live=live), entries
            live = mode is Mode.FULL
    return sums


def _given(row: BatchRow, others: Sequence[tuple[float, Entries]], base_ms: float) -> list[Block]:
    """The row's blocks beside the others': an entry of its template that they load costs it nothing."""
    return [
        replace(
            block,
            hidden_slabs=0 if (row.template, Mode.HIDDEN) in entries else block.hidden_slabs,
            kv_slabs=0 if (row.template, Mode.KV) in entries else block.kv_slabs,
            others_ms=base_ms + ms,
            others_slabs=sum(entries.values()),
        )
        for block, (ms, entries) in zip(row.blocks, others, strict=True)
    ]
