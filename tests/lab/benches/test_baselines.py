"""Batches of static batching, which benchmarks compare with."""

from __future__ import annotations

from giornata_lab.bench.compute.static_batching import in_batches, in_equal_batches
from giornata_lab.bench.compute.workload import WorkloadEdit


def edit(index: int, steps: int) -> WorkloadEdit:
    return WorkloadEdit(index, 0, 0.1, 0, 0, steps)


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
