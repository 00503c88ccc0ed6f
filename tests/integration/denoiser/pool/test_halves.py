"""Guidance halves, chosen by step where they are the quicker way of two devices: equal to one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from giornata.families import Family
from giornata.planning.degrees import StepParallelism
from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.choices import EXACT
from tests.integration.denoiser.pool.bench import Gathered, Walk, equal, make_model, running
from tests.integration.denoiser.pool.test_masks import FORMS, GRID, STEPS, taking, template, walked


def ways(bench: Gathered) -> Counter[StepParallelism]:
    """How many steps were computed in which way, as the samples tell."""
    return Counter(StepParallelism(sample.degree, sample.halves) for sample in bench.samples)


def test_guided_rows_of_a_transformer_have_halves_and_others_share_tokens(tmp_path: Path) -> None:
    """A row that learns a correction by halves has it by halves afterwards."""
    model = make_model(tmp_path, (2,), halves=True)
    plan: list[Devices] = [(0, 1), (0, 1), (0, 1), (1,), (0, 1), (0, 1)]
    rows = [
        model.row("guided", steps=STEPS, guided=True),
        model.row("plain", steps=STEPS, seed=1),
        model.row("own", grid=GRID, steps=STEPS, seed=2, guided=True, masked=True),
        taking(model, template(model, FORMS[0]), "takes", seed=3, guided=True),
    ]
    config = model.config(2).model_copy(update={"template_bits": EXACT})
    with running(config, Walk(plan)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    assert ways(bench) == {
        StepParallelism(2, halves=True): 3 * 5,
        StepParallelism(2): 5,
        StepParallelism(1): 4,
    }
    equal(bench.latents(), {row.key.job_id: walked(model, row, plan).latent for row in rows})


def test_a_unet_is_computed_by_halves_and_in_no_other_way(tmp_path: Path) -> None:
    """Whatever its profile has: its rows without guidance have one device."""
    model = make_model(tmp_path, (2, 3), halves=True, of=Family.SD_INPAINT)
    rows = [model.row(f"{seed}", grid=(4, 4), seed=seed, guided=seed < 2) for seed in range(3)]
    with running(model.config(2)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    found = ways(bench)
    assert found.keys() == {StepParallelism(), StepParallelism(2, halves=True)}
    equal(bench.latents(), model.alone(rows))
