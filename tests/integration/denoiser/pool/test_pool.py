"""Pools compute what one process computes, whichever devices compute which step."""

from __future__ import annotations

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
