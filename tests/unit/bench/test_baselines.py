"""What benchmarks compare with: batches of static batching and brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from giornata.planning.batch import evaluate, plan_batch
from giornata.planning.blocks import Link
from giornata.wire.values import Mode
from tests.bench.compute.brute_force import best_ms
from tests.bench.compute.static_batching import in_batches, in_equal_batches
from tests.bench.planner_gap import random_link, random_row
from tests.bench.systems.workload import Edit


def edit(index: int, steps: int) -> Edit:
    return Edit(index, 0, 0.1, 0, 0, steps)


def test_a_static_batch_takes_the_steps_of_its_longest() -> None:
    batches = in_batches([edit(0, 8), edit(1, 50), edit(2, 20)], 2)
    assert [([e.index for e in batch], steps) for batch, steps in batches] == [([0, 1], 50), ([2], 20)]


def test_batches_of_equal_counts_keep_the_order_of_arrival() -> None:
    batches = in_equal_batches([edit(0, 8), edit(1, 50), edit(2, 8), edit(3, 8)], 2)
    assert [([e.index for e in batch], steps) for batch, steps in batches] == [
        ([0, 2], 8),
        ([3], 8),
        ([1], 50),
    ]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_brute_force_finds_the_least_of_all_plans(seed: int, *, shared: bool) -> None:
    chance = random.Random(seed)  # noqa: S311 - cases, no secrets
    rows = [random_row(chance, 2, 0), random_row(chance, 2, 0 if shared else 1)]
    link = random_link(chance)
    plans = itertools.product(itertools.product(Mode, repeat=2), repeat=2)
    least = min(evaluate(rows, modes, link).timeline.finish_ms for modes in plans)
    assert best_ms(rows, link) == pytest.approx(least)
    assert plan_batch(rows, link).timeline.finish_ms >= least - 1e-9


def test_a_busy_link_delays_the_best_plan() -> None:
    rows = [random_row(random.Random(0), 3, 0)]  # noqa: S311 - likewise
    free, busy = (best_ms(rows, Link(0.5, busy)) for busy in (0.0, 100.0))
    assert free < busy
