"""Pools compute what one process computes, whichever devices compute which step."""

from __future__ import annotations

from dataclasses import replace

import torch

from giornata.scheduling.batch import Capacity
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.rows.keeping import Keeping
from giornata_denoiser.rows.row import Row
from tests.integration.denoiser.pool.bench import Model, Walk, equal, running


def test_rows_of_two_ranks_equal_those_of_one_process(model: Model) -> None:
    rows = [
        model.row("first", steps=5),
        model.row("guided", grid=(3, 3), steps=4, seed=1, guided=True),
        model.row("small", grid=(2, 2), steps=3, seed=3),
    ]
    with running(model.config(2)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    equal(bench.latents(), model.alone(rows))


def test_degree_and_devices_change_between_the_steps_of_a_row(model: Model) -> None:
    plan = [(0,), (0, 1), (0, 1, 2, 3), (2, 3), (0, 1, 2), (3,), (3,), (0, 1, 2, 3)]
    rows = [model.row("walks", steps=len(plan)), model.row("too", steps=len(plan), seed=1, guided=True)]
    with running(model.config(4), Walk(plan)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended(["walks", "too"])
    assert sorted(bench.degrees) == sorted(2 * [len(devices) for devices in plan])
    equal(bench.latents(), model.alone(rows))


def test_what_a_row_keeps_on_the_way_is_that_of_one_process(model: Model) -> None:
    """States of rows lie in memory that later steps write again: what is kept is a copy."""
    asked = replace(model.row("keeps", steps=8), keeping=Keeping(frozenset({1, 2, 4}), None))
    with running(model.config(2)) as bench:
        assert bench.pool.submit([asked])
        bench.until_ended(["keeps"])
    ended = bench.ended["keeps"]
    assert isinstance(ended, Row)
    kept = dict(ended.kept)
    assert set(kept) == {1, 2, 4}
    engine = Engine(model.checkpoint.family, Capacity(1, 1), lambda: 0.0)
    engine.batch.submit([model.row("keeps", steps=8)])
    while (report := engine.step()) is not None:
        (row,) = report.advanced
        if row.step in kept:
            torch.testing.assert_close(kept[row.step].float(), row.latent, atol=2e-3, rtol=1e-3)
