"""Batches of static batching, which benchmarks compare with."""

from __future__ import annotations

from typing import Any

import torch

from giornata_lab.bench.compute.models import family
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.static_batching import (
    KLEIN,
    KleinStaticBatching,
    in_batches,
    in_equal_batches,
)
from giornata_lab.bench.compute.workload import WorkloadEdit, square


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


def test_kleins_pipeline_denoises_the_same_edits_beside_their_clean_pictures() -> None:
    """By the engine's weights, all steps of all edits; what no mask has touched stays the picture's."""
    rows = Rows(family(KLEIN, device=torch.device("cpu")), 4, 3)
    static = KleinStaticBatching(rows, published=False)
    engine: Any = rows.family.network
    theirs, ours = (
        of.transformer_blocks[0].attn.to_q.weight for of in (static.transformer, engine.transformer)
    )
    assert torch.equal(theirs, ours)
    seen: list[tuple[int, ...]] = []
    static.transformer.register_forward_pre_hook(
        lambda _, __, told: seen.append(
            (*told["hidden_states"].shape, told["encoder_hidden_states"].shape[1])
        ),
        with_kwargs=True,
    )
    drawn = [WorkloadEdit(0, 0, 0.3, 0, 0, 4), WorkloadEdit(1, 1, 0.3, 1, 1, 4)]
    found = static.denoised(drawn, 4)
    whole = rows.row(drawn[0], reuse=False).block_tokens
    assert seen == [(2, whole, rows.channels, 3)] * 4
    for latents, edit_of in zip(found, drawn, strict=True):
        touched, picture = square(edit_of, 4).flatten(), rows.picture(edit_of.template)
        torch.testing.assert_close(latents[~touched], picture[~touched])
        assert (latents[touched] - picture[touched]).abs().min() > 0
