"""Plans against brute force, and batches against a run of their rows block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning import plans
from giornata.planning.operations import BatchRow, BlockLoads, LoadLink, Modes, RowBlocks, takes
from giornata.planning.plans import (
    evaluate_modes,
    exact_modes,
    greedy_modes,
    plan_batch,
    plan_each_alone,
    prefix_batch,
    scanned,
    uniform_modes,
)
from giornata.wire.values import BlockMode
from tests.examples import examples
from tests.present import present

LINKS = st.builds(LoadLink, slab_ms=st.floats(0, 8), busy_ms=st.floats(0, 10))
BASES = st.sampled_from([0.0, 2.5])
Block = tuple[float, float, float, int, int, bool, bool, bool]


def blocks_of(*blocks: Block) -> RowBlocks:
    columns = list(zip(*blocks, strict=True))
    numbers, flags = (
        np.array(columns[part], kind) for part, kind in ((slice(5), float), (slice(5, 8), bool))
    )
    return RowBlocks(*numbers, *flags)


def equal_blocks(count: int, full: float, hidden: float, kv: float, *slabs: int) -> RowBlocks:
    hidden_slabs, kv_slabs = slabs
    return blocks_of(
        *[(full, hidden, kv, hidden_slabs, kv_slabs, place == 0, True, True) for place in range(count)]
    )


def finish_ms(row: BatchRow, modes: Modes, link: LoadLink, base_ms: float = 0.0) -> float:
    return evaluate_modes([row], [modes], link, base_ms).finish_ms


@st.composite
def rows(
    draw: st.DrawFn, most_rows: int = 2, most_blocks: int = 3, most_steps: int = 2, *, hidden: bool = True
) -> list[BatchRow]:
    """Rows of one step, or of it and the next; templates keep keys and values from some block on, or with gaps.

    Rows of one template load as much for a block, each of them, or different amounts.
    """
    steps, count = draw(st.integers(1, most_steps)), draw(st.integers(1, most_blocks))
    shared, same_entries = draw(st.booleans()), draw(st.booleans())
    loads = st.lists(st.integers(0, 3), min_size=steps * count, max_size=steps * count)
    entries = draw(loads) if shared and same_entries else None
    found = []
    for index in range(draw(st.integers(1, most_rows))):
        first = draw(st.sampled_from([0, 0, 1, count]))
        slabs = draw(loads) if entries is None else entries
        made = []
        for place in range(steps * count):
            full = draw(st.floats(0.1, 10))
            projected, cached = full * draw(st.floats(0.2, 1)), full * draw(st.floats(0.05, 1))
            kept = place % count >= first and draw(st.sampled_from([True] * 9 + [False]))
            keeps_hidden = hidden and draw(st.sampled_from([True, True, False]))
            made.append(
                (
                    full,
                    projected,
                    cached,
                    draw(st.integers(0, 2)) if hidden else 0,
                    slabs[place],
                    place % count == 0,
                    keeps_hidden,
                    kept,
                )
            )
        found.append(BatchRow(blocks_of(*made), "one" if shared else index))
    return found


def every(row: BatchRow) -> list[Modes]:
    return list(product(BlockMode, repeat=len(row.blocks)))


@examples(times=2)  # plans that differ are few among the draws, and a draw costs little
@given(rows(most_rows=3, most_blocks=4), LINKS, BASES, st.data())
def test_a_batch_runs_as_its_rows_do_block_by_block(
    batch: list[BatchRow], link: LoadLink, base_ms: float, data: st.DataObject
) -> None:
    """An entry that several rows of one template take is loaded once: the most that one of them asks for."""
    modes = [tuple(data.draw(st.sampled_from(list(BlockMode))) for _ in row.blocks.fresh) for row in batch]
    ended, total, now = [], 0, 0.0
    for place in range(len(modes[0])):
        entries: dict[tuple[object, bool], int] = {}
        ms = base_ms
        for row, chosen in zip(batch, modes, strict=True):
            blocks, kv = row.blocks, chosen[place] is BlockMode.KV
            live = bool(blocks.fresh[place]) or (place > 0 and chosen[place - 1] is BlockMode.FULL)
            slabs = blocks.kv_slabs[place] if kv else 0 if live else blocks.hidden_slabs[place]
            entries[row.template, kv] = max(entries.get((row.template, kv), 0), int(slabs))
            there = blocks.kv_kept[place] if kv else live or blocks.hidden_kept[place]
            by_mode = {
                BlockMode.KV: blocks.kv_ms,
                BlockMode.HIDDEN: blocks.hidden_ms,
                BlockMode.FULL: blocks.full_ms,
            }
            ms += by_mode[chosen[place]][place] if there else math.inf
        needed = sum(entries.values())
        total += needed
        now = max(now, link.busy_ms + total * link.slab_ms if needed else 0.0) + ms
        ended.append(now)
    plan = evaluate_modes(batch, modes, link, base_ms)
    assert plan.ended_ms == pytest.approx(ended, rel=1e-9)
    assert plan.slabs == total


@given(rows(most_rows=1, most_blocks=4, most_steps=1), LINKS, BASES)
def test_one_row_is_planned_as_well_as_it_can_be(
    batch: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    (row,) = batch
    least = min(finish_ms(row, modes, link, base_ms) for modes in every(row))
    exact = exact_modes(row.blocks, link, base_ms)
    assert finish_ms(row, exact, link, base_ms) == pytest.approx(least, rel=1e-9)
    assert plan_batch(batch, link, base_ms).finish_ms == pytest.approx(least, rel=1e-9)
    assert finish_ms(row, greedy_modes(row.blocks, link, base_ms), link, base_ms) >= least - 1e-9


@given(rows(most_rows=1, most_blocks=2, hidden=False), LINKS, BASES)
def test_one_row_without_hidden_states_is_planned_as_well_over_two_steps(
    batch: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    (row,) = batch
    prefixes = present(prefix_batch(batch))
    ends = {modes: finish_ms(row, modes, link, base_ms) for modes in every(row)}
    assert plan_batch(batch, link, base_ms).finish_ms == pytest.approx(min(ends.values()), rel=1e-9)
    candidates = scanned(prefixes, None, link, 0.0).computing_ms[0]
    counts = [int(np.isfinite(step).sum()) for step in candidates]
    assert math.prod(counts) == sum(map(math.isfinite, ends.values())), "candidates are all plans there are"


@given(rows(), LINKS, BASES)
def test_no_other_plan_of_one_row_of_a_batch_is_better(
    batch: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    if len(batch[0].blocks) > 4:
        return
    plan = plan_batch(batch, link, base_ms)
    assert plan == evaluate_modes(batch, plan.modes, link, base_ms)
    for index, row in enumerate(batch):
        for modes in every(row):
            other = [*plan.modes]
            other[index] = modes
            assert plan.finish_ms <= evaluate_modes(batch, other, link, base_ms).finish_ms * 1.01 + 1e-9


@given(rows(most_rows=4, most_blocks=6, hidden=False), LINKS, BASES)
def test_nothing_else_that_is_tried_is_much_better(
    batch: list[BatchRow], link: LoadLink, base_ms: float
) -> None:
    """No other planner of batches is better by a tenth."""
    plan = plan_batch(batch, link, base_ms)
    assert plan == evaluate_modes(batch, plan.modes, link, base_ms)
    for planner in (exact_modes, greedy_modes, *map(uniform_modes, BlockMode)):
        other = plan_each_alone(planner)(batch, link, base_ms)
        assert plan.finish_ms <= other.finish_ms * 1.1 + 1e-9


@examples(times=2)  # as above
@given(rows(most_rows=4, most_blocks=6, most_steps=1, hidden=False), LINKS, BASES, st.data())
def test_candidates_beside_other_rows_are_timed_as_the_batch_is(
    batch: list[BatchRow], link: LoadLink, base_ms: float, data: st.DataObject
) -> None:
    """Rows of one template load the most of what each of them asks for, once, however different that is."""
    prefixes = present(prefix_batch(batch))
    candidates = st.integers(0, 2 * prefixes.blocks)
    chosen = np.array([[data.draw(candidates)] for _ in batch])
    found = scanned(prefixes, chosen, link, base_ms)
    index, candidate = data.draw(st.integers(0, len(batch) - 1)), data.draw(candidates)
    chosen[index] = candidate
    wanted = evaluate_modes(batch, prefixes.modes(chosen), link, base_ms)
    computing, waiting, slabs = (column[index, 0, candidate] for column in found)
    if math.isfinite(wanted.finish_ms):
        assert max(computing, link.busy_ms + waiting) == pytest.approx(wanted.finish_ms, rel=1e-9)
        assert slabs == wanted.slabs


@pytest.mark.parametrize(("load", "greedy_ms", "exact_ms"), [(8, 458, 290), (6, 344, 248), (2, 116, 116)])
def test_where_loading_dominates_the_paper_loses(load: int, greedy_ms: float, exact_ms: float) -> None:
    """57 equal blocks with cache 2, without 10 (FACTS of the design); loads without liveness, as the paper has them."""
    row, link = BatchRow(equal_blocks(57, 10, 10, 2, 0, load), "t"), LoadLink(slab_ms=1)
    assert finish_ms(row, greedy_modes(row.blocks, link), link) == pytest.approx(greedy_ms)
    assert finish_ms(row, exact_modes(row.blocks, link), link) == pytest.approx(exact_ms)


def test_greedy_knows_what_blocks_take_besides_and_takes_nothing_that_is_not_kept() -> None:
    """Without it the second block computes in full; beside it its load has arrived."""
    row = BatchRow(equal_blocks(2, 5, 6, 1, 0, 1), "t")
    planner, link = plan_each_alone(greedy_modes), LoadLink(slab_ms=9.5)
    assert planner([row], link, 0.0).modes == ((BlockMode.FULL, BlockMode.FULL),)
    assert planner([row], link, 6.0).modes == ((BlockMode.FULL, BlockMode.KV),)
    assert planner([row], link, 6.0).finish_ms == 18
    bare = BatchRow(blocks_of((5, 6, 1, 0, 1, True, False, False)), "t")
    assert plan_each_alone(uniform_modes(BlockMode.KV))([bare], link, 0.0).modes == ((BlockMode.FULL,),)


def test_rows_of_one_template_load_once() -> None:
    row, link = equal_blocks(4, 10, 6, 2, 2, 4), LoadLink(slab_ms=1)
    together, apart = (plan_batch([BatchRow(row, "t"), BatchRow(row, other)], link) for other in "tu")
    assert together.slabs < apart.slabs or together.finish_ms < apart.finish_ms


@pytest.mark.parametrize(
    ("first", "second", "templates"),
    [
        (
            [(7, 2, 0.5, 2, 7, True, True, True), (2, 2, 0.5, 3, 6, False, True, True)],
            [(5, 3, 2, 1, 7, True, True, True), (4, 4, 1, 0, 6, False, True, True)],
            "tt",
        ),
        (
            [(2, 1, 3, 2, 7, True, True, True), (6, 5, 2, 2, 6, False, True, True)],
            [(4, 4, 2, 3, 0, True, True, True), (5, 4, 2, 0, 1, False, True, True)],
            "tu",
        ),
    ],
    ids=["takes what is loaded anyway", "meets what the other one takes and loads"],
)
def test_a_row_is_planned_beside_the_other_one(
    first: Sequence[Block], second: Sequence[Block], templates: str
) -> None:
    """Of two rows of one template the second block of one takes entries that it would not load alone."""
    rows = [BatchRow(blocks_of(*each), of) for each, of in zip((first, second), templates, strict=True)]
    link = LoadLink(slab_ms=1)
    least = min(
        evaluate_modes(rows, modes, link).finish_ms for modes in product(every(rows[0]), every(rows[1]))
    )
    assert plan_batch(rows, link).finish_ms == least


def test_planning_ends_with_a_change_that_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(wraps=scanned)
    monkeypatch.setattr(plans, "scanned", asked)
    row = equal_blocks(4, 10, 10, 2, 0, 4)
    rows = [BatchRow(replace(row, hidden_kept=row.fresh), of) for of in "tu"]
    assert plan_batch(rows, LoadLink(slab_ms=1)).slabs
    assert 2 <= asked.call_count < plans.MOVES / 2


def test_the_largest_entry_is_that_of_any_block_of_either_step() -> None:
    none, some = BlockLoads.equal(2, hidden_kept=False), BlockLoads.equal(2, 3, 5)
    assert none.largest_bytes == 0
    assert none.then(some).largest_bytes == some.then(none).largest_bytes == 5
    assert BlockLoads.equal(2, 5, 3).largest_bytes == 5


def test_unequal_rows_and_unequal_modes_are_refused() -> None:
    one, two = (BatchRow(equal_blocks(count, 1, 1, 1, 0, 0), 0) for count in (1, 2))
    with pytest.raises(ValueError, match=r"rows have \[1, 2\] blocks"):
        plan_batch([one, two], LoadLink(1))
    with pytest.raises(ValueError, match="received 1 modes for 2 blocks"):
        evaluate_modes([two], [(BlockMode.KV,)], LoadLink(1))


@given(st.lists(st.sampled_from(list(BlockMode)), min_size=1, max_size=8))
def test_what_a_step_takes_is_what_its_blocks_load(modes: Sequence[BlockMode]) -> None:
    row = BatchRow(equal_blocks(len(modes), 1, 1, 1, 10, 1), "t")
    forms, kv, hidden = takes(tuple(modes))
    assert evaluate_modes([row], [tuple(modes)], LoadLink(0.0)).slabs == kv.sum() + 10 * hidden.sum()
    assert [form is BlockMode.KV for form in forms] == kv.astype(bool).tolist()
    assert [form is BlockMode.HIDDEN for form in forms] == hidden.astype(bool).tolist()
