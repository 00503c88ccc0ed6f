"""Plans of rows that keep no hidden states, against the exact planner and against every other one."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.batch_plans import BatchRow, evaluate_modes, plan_batch, plan_each_alone
from giornata.planning.block_plans import (
    BlockCost,
    BlockCostColumns,
    LoadLink,
    Modes,
    exact_modes,
    greedy_modes,
    sequential_end_ms,
    takes,
    timeline,
    uniform_modes,
)
from giornata.planning.prefix_plans import PrefixPlanBatch, prefix_batch, scanned
from giornata.wire.values import BlockMode
from tests.examples import examples

LINKS = st.builds(LoadLink, slab_ms=st.floats(0, 8), busy_ms=st.floats(0, 10))
BASES = st.sampled_from([0.0, 2.5])


@st.composite
def rows_of_prefixes(
    draw: st.DrawFn, most_rows: int = 4, most_blocks: int = 6, most_steps: int = 2
) -> list[BatchRow]:
    """Rows whose templates keep keys and values from some block on, or with gaps; one step, or it and the next.

    Rows of one template load as much for a block, each of them, or different amounts.
    """
    steps, count = draw(st.integers(1, most_steps)), draw(st.integers(1, most_blocks))
    alike, shared, same_entries = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    loads = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=steps * count, max_size=steps * count)
    entries = draw(loads) if shared and same_entries else None
    rows = []
    for index in range(draw(st.integers(1, most_rows))):
        first = draw(st.sampled_from([0, 0, 1, count]))
        slabs = draw(loads) if entries is None else entries
        found: list[BlockCost] = []
        costs = (0.0, 0.0, 0.0)
        for place in range(steps * count):
            if not (alike and found):
                full = draw(st.floats(0.1, 10))
                costs = full, full * draw(st.floats(0.2, 1)), full * draw(st.floats(0.05, 1))
            found.append(
                BlockCost(
                    *costs,
                    hidden_slabs=0,
                    kv_slabs=slabs[place],
                    fresh=place % count == 0,
                    hidden_kept=False,
                    kv_kept=place % count >= first and draw(st.sampled_from([True] * 9 + [False])),
                )
            )
        rows.append(BatchRow(tuple(found), "one" if shared else index))
    return rows


def of(rows: list[BatchRow]) -> PrefixPlanBatch:
    found = prefix_batch([row.columns for row in rows], [row.template for row in rows])
    assert found is not None
    return found


@examples(times=4)  # plans that differ are few among the draws, and a draw costs little
@given(rows_of_prefixes(most_rows=1), LINKS, BASES)
def test_one_row_is_planned_as_well_as_by_the_exact_planner(
    rows: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    (row,) = rows
    plan = plan_batch(rows, link, base_ms)
    beside = [replace(block, others_ms=base_ms) for block in row.blocks]
    best = timeline(beside, exact_modes(beside, link), link)
    (modes,) = plan.modes
    carried_out = timeline(beside, modes, link)
    assert plan.timeline.finish_ms == pytest.approx(best.finish_ms, rel=1e-9)
    assert plan.timeline.ended_ms == pytest.approx(carried_out.ended_ms, rel=1e-9)
    assert plan.timeline.slabs == carried_out.slabs


@given(rows_of_prefixes(most_rows=1, most_blocks=3), LINKS)
def test_candidates_are_all_plans_there_are(rows: list[BatchRow], link: LoadLink) -> None:
    """Whatever else has an end is no other sequence of modes."""
    (row,) = rows
    every = product(BlockMode, repeat=len(row.blocks))
    possible = {modes for modes in every if timeline(row.blocks, modes, link).finish_ms < float("inf")}
    candidates = scanned(of(rows), None, link, 0.0).computing_ms[0]
    count = 1
    for step in candidates:
        count *= int((step < float("inf")).sum())
    assert len(possible) == count


@examples(times=4)  # plans that differ are few among the draws, and a draw costs little
@given(rows_of_prefixes(), LINKS, BASES)
def test_nothing_else_that_is_tried_is_much_better(
    rows: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    """No other planner of batches is better by a tenth, nor is doing for each row what is best for it alone."""
    plan = plan_batch(rows, link, base_ms)
    assert plan == evaluate_modes(rows, plan.modes, link, base_ms)
    for planner in (
        plan_each_alone(greedy_modes),
        *(plan_each_alone(uniform_modes(mode)) for mode in BlockMode),
    ):
        assert plan.timeline.finish_ms <= planner(rows, link, base_ms).timeline.finish_ms * 1.1 + 1e-9
    naive = sum(sequential_end_ms(row.blocks, exact_modes(row.blocks, LoadLink(0.0)), link) for row in rows)
    assert plan.timeline.finish_ms <= (naive + base_ms * len(rows[0].blocks)) * 1.1 + 1e-9


@examples(times=4)  # plans that differ are few among the draws, and a draw costs little
@given(rows_of_prefixes(most_steps=1), LINKS, BASES, st.data())
def test_candidates_beside_other_rows_are_timed_as_the_batch_is(
    rows: list[BatchRow], link: LoadLink, base_ms: float, data: st.DataObject
) -> None:
    """Rows of one template load the most of what each of them asks for, once, however different that is."""
    count = len(rows[0].blocks)
    candidates = st.integers(0, 2 * count)
    chosen = [data.draw(candidates) for _ in rows]
    found = scanned(of(rows), np.array(chosen)[:, np.newaxis], link, base_ms)
    index, candidate = data.draw(st.integers(0, len(rows) - 1)), data.draw(candidates)
    chosen[index] = candidate
    wanted = evaluate_modes(rows, [_modes(each, count) for each in chosen], link, base_ms).timeline
    computing, waiting, slabs = (column[index, 0, candidate] for column in found)
    if math.isfinite(wanted.finish_ms):
        assert max(computing, link.busy_ms + waiting) == pytest.approx(wanted.finish_ms, rel=1e-9)
        assert slabs == wanted.slabs


def _modes(candidate: int, count: int) -> Modes:
    if candidate <= count:
        return (BlockMode.FULL,) * candidate + (BlockMode.KV,) * (count - candidate)
    full = candidate - count - 1
    return (*(BlockMode.FULL,) * full, BlockMode.HIDDEN, *(BlockMode.KV,) * (count - full - 1))


@examples(times=4)  # plans that differ are few among the draws, and a draw costs little
@given(rows_of_prefixes(), LINKS, BASES, st.data())
def test_a_batch_runs_as_its_rows_do_block_by_block(
    rows: list[BatchRow], link: LoadLink, base_ms: float, data: st.DataObject
) -> None:
    """`evaluate` against the timeline of one row beside which the others compute and load."""
    rows = [replace(row, template=index) for index, row in enumerate(rows)]
    modes: list[Modes] = [
        tuple(data.draw(st.sampled_from(list(BlockMode))) for _ in row.blocks) for row in rows
    ]
    merged = []
    for place, first in enumerate(rows[0].blocks):
        others = [
            (row.blocks[place], chosen[place], place > 0 and chosen[place - 1] is BlockMode.FULL)
            for row, chosen in zip(rows[1:], modes[1:], strict=True)
        ]
        ms = base_ms + sum(block.compute_ms(mode, live=live) for block, mode, live in others)
        slabs = sum(block.slabs(mode, live=live) for block, mode, live in others)
        merged.append(replace(first, others_ms=ms, others_slabs=slabs))
    wanted = timeline(merged, modes[0], link)
    found = evaluate_modes(rows, modes, link, base_ms).timeline
    assert found.ended_ms == pytest.approx(wanted.ended_ms, rel=1e-9)
    assert found.slabs == wanted.slabs


@given(rows_of_prefixes(most_rows=1))
def test_columns_are_the_blocks(rows: list[BatchRow]) -> None:
    assert tuple(BlockCostColumns.of(rows[0].blocks)) == rows[0].blocks


@given(st.lists(st.sampled_from(list(BlockMode)), min_size=1, max_size=8))
def test_what_a_step_takes_is_what_its_blocks_load(modes: list[BlockMode]) -> None:
    blocks = [BlockCost(1, 1, 1, 10, 1, fresh=place == 0) for place in range(len(modes))]
    forms, kv, hidden = takes(tuple(modes))
    assert timeline(blocks, modes, LoadLink(0.0)).slabs == kv.sum() + 10 * hidden.sum()
    assert [form is BlockMode.KV for form in forms] == kv.astype(bool).tolist()
    assert [form is BlockMode.HIDDEN for form in forms] == hidden.astype(bool).tolist()


def test_rows_with_hidden_states_are_left_to_the_exact_planner() -> None:
    row = BatchRow((BlockCost(5, 3, 1, 1, 2, fresh=True), BlockCost(5, 3, 1, 1, 2)), "t")
    assert prefix_batch([row.columns], ["t"]) is None
