"""The planner against brute force: the best of all sequences of modes, run by the same timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.batch_plans import BatchRow, evaluate_modes, plan_batch, plan_each_alone
from giornata.planning.block_plans import (
    BlockCost,
    LoadLink,
    Planner,
    exact_modes,
    greedy_modes,
    sequential_end_ms,
    timeline,
    uniform_modes,
)
from giornata.wire.values import BlockMode

MS = st.floats(0.1, 10, allow_nan=False)
LINKS = st.builds(LoadLink, slab_ms=st.floats(0, 8), busy_ms=st.floats(0, 10))


@st.composite
def blocks(draw: st.DrawFn, most: int = 6) -> list[BlockCost]:
    """Up to `most` blocks, every few of them a step."""
    steps = draw(st.integers(1, 2))
    count = draw(st.integers(1, most))
    found = []
    for index in range(count):
        full = draw(MS)
        found.append(
            BlockCost(
                full,
                full * draw(st.floats(0.2, 1)),
                full * draw(st.floats(0.05, 1)),
                draw(st.integers(0, 2)),
                draw(st.integers(0, 3)),
                fresh=index % (-(-count // steps)) == 0,
                others_ms=draw(st.sampled_from([0.0, 1.5])),
                others_slabs=draw(st.sampled_from([0, 0, 1])),
                hidden_kept=draw(st.sampled_from([True, True, False])),
                kv_kept=draw(st.sampled_from([True, True, False])),
            )
        )
    return found


def finish_ms(planner: Planner, found: Sequence[BlockCost], link: LoadLink) -> float:
    return timeline(found, planner(found, link), link).finish_ms


@given(blocks(), LINKS)
def test_exact_is_the_best_of_all(found: list[BlockCost], link: LoadLink) -> None:
    best = min(timeline(found, modes, link).finish_ms for modes in product(BlockMode, repeat=len(found)))
    assert finish_ms(exact_modes, found, link) == pytest.approx(best, rel=1e-9)


@given(blocks(most=12), LINKS)
def test_nothing_else_is_better_than_exact(found: list[BlockCost], link: LoadLink) -> None:
    least = finish_ms(exact_modes, found, link)
    for planner in (greedy_modes, *(uniform_modes(mode) for mode in BlockMode)):
        assert finish_ms(planner, found, link) >= least - 1e-9
        assert sequential_end_ms(found, planner(found, link), link) >= finish_ms(planner, found, link) - 1e-9


@given(blocks(most=10), LINKS)
def test_a_full_block_has_its_hidden_state(found: list[BlockCost], link: LoadLink) -> None:
    """Wherever the outside tokens' state is gone, a mode that needs it has paid for it."""
    modes = exact_modes(found, link)
    slabs, live = 0, False
    for block, mode in zip(found, modes, strict=True):
        if mode is BlockMode.KV:
            slabs += block.kv_slabs
        elif not (live or block.fresh):
            slabs += block.hidden_slabs
        slabs += block.others_slabs
        live = mode is BlockMode.FULL
    assert timeline(found, modes, link).slabs == slabs


@pytest.mark.parametrize(("load", "greedy_ms", "exact_ms"), [(8, 458, 290), (6, 344, 248), (2, 116, 116)])
def test_where_loading_dominates_the_paper_loses(load: int, greedy_ms: float, exact_ms: float) -> None:
    """57 equal blocks with cache 2, without 10 (FACTS of the design); loads without liveness, as the paper has them."""
    equal = [BlockCost(10, 10, 2, 0, load)] * 57
    link = LoadLink(slab_ms=1)
    assert finish_ms(greedy_modes, equal, link) == pytest.approx(greedy_ms)
    assert finish_ms(exact_modes, equal, link) == pytest.approx(exact_ms)


def test_what_is_loaded_ahead_costs_nothing() -> None:
    cold = [BlockCost(10, 6, 2, 2, 4, fresh=i == 0) for i in range(8)]
    ahead = [BlockCost(10, 6, 2, 2, 0 if i < 4 else 4, fresh=i == 0) for i in range(8)]
    link = LoadLink(slab_ms=1.5)
    assert finish_ms(exact_modes, ahead, link) < finish_ms(exact_modes, cold, link)
    assert exact_modes(ahead, link)[:4] == (BlockMode.KV,) * 4
    assert finish_ms(exact_modes, cold, LoadLink(1.5, busy_ms=50)) > finish_ms(exact_modes, cold, link)


def test_nothing_to_plan() -> None:
    assert finish_ms(exact_modes, [], LoadLink(1.0)) == 0
    with pytest.raises(ValueError, match="received 1 modes for 0 blocks"):
        timeline([], [BlockMode.FULL], LoadLink(1.0))


@st.composite
def batches(draw: st.DrawFn) -> list[BatchRow]:
    count = draw(st.integers(1, 3))
    rows = []
    for index in range(draw(st.integers(1, 2))):
        found = []
        for place in range(count):
            full = draw(MS)
            found.append(
                BlockCost(
                    full, full * 0.6, full * 0.3, draw(st.integers(0, 2)), draw(st.integers(0, 3)), place == 0
                )
            )
        rows.append(BatchRow(tuple(found), draw(st.sampled_from(["one", index]))))
    return rows


@given(batches(), LINKS)
def test_a_batch_is_planned_near_the_best(rows: list[BatchRow], link: LoadLink) -> None:
    plan = plan_batch(rows, link)
    assert plan == evaluate_modes(rows, plan.modes, link)
    every = product(product(BlockMode, repeat=len(rows[0].blocks)), repeat=len(rows))
    least = min(evaluate_modes(rows, modes, link).timeline.finish_ms for modes in every)
    assert plan.timeline.finish_ms >= least - 1e-9
    assert plan.timeline.finish_ms <= 1.5 * least + 1e-9
    if len(rows) == 1:
        assert plan.timeline.finish_ms == pytest.approx(least)


def test_rows_of_one_template_load_once() -> None:
    row = tuple(BlockCost(10, 6, 2, 2, 4, i == 0) for i in range(4))
    link = LoadLink(slab_ms=1)
    together = plan_batch([BatchRow(row, "t"), BatchRow(row, "t")], link).timeline
    apart = plan_batch([BatchRow(row, "t"), BatchRow(row, "u")], link).timeline
    assert together.slabs < apart.slabs or together.finish_ms < apart.finish_ms


def test_greedy_knows_what_blocks_take_besides() -> None:
    """Without it the second block computes in full; beside it its load has arrived."""
    row = BatchRow((BlockCost(5, 6, 1, 0, 1, fresh=True), BlockCost(5, 6, 1, 0, 1)), "t")
    planner, link = plan_each_alone(greedy_modes), LoadLink(slab_ms=9.5)
    assert planner([row], link, 0.0).modes == ((BlockMode.FULL, BlockMode.FULL),)
    assert planner([row], link, 6.0).modes == ((BlockMode.FULL, BlockMode.KV),)
    assert planner([row], link, 6.0).timeline.finish_ms == 18


@given(batches(), LINKS, st.floats(0, 20))
def test_greedy_alone_is_the_papers(rows: list[BatchRow], link: LoadLink, base_ms: float) -> None:
    """Its block times are what a row's blocks take with all that is computed beside them."""
    (row, *_) = rows
    beside = [replace(block, others_ms=base_ms) for block in row.blocks]
    plan = plan_each_alone(greedy_modes)([row], link, base_ms)
    assert plan.modes == (greedy_modes(beside, link),)
    assert plan.timeline.finish_ms == pytest.approx(finish_ms(greedy_modes, beside, link))


def test_unequal_rows_are_refused() -> None:
    block = BlockCost(1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match=r"rows have \[1, 2\] blocks"):
        plan_batch([BatchRow((block,), 0), BatchRow((block, block), 0)], LoadLink(1))
