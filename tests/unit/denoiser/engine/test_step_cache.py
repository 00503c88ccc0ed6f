"""Step caches: rows of one step that pass all blocks or none, and do not notice each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_budget import row_bytes
from giornata_denoiser.rows.parts import (
    Adapters,
    RowLora,
    TaylorExpansion,
    TaylorRule,
    cache_bytes,
    extrapolated,
)
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.step_caches import taylor
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, ROOMY, edit, engine, template
from tests.unit.denoiser.engine.test_masked import BLOCKS, OF, exact_family

TOLERANCE = 1e-10
TAYLOR = taylor(interval=4, order=1, warmup=2)


def cached(row: Row, rule: TaylorRule | None) -> Row:
    return replace(row, step_cache=rule)


def run(made: Engine, arrivals: dict[int, list[Row]]) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Final latents by job, and of each computed step the blocks that it passed and skipped."""
    final: dict[str, Tensor] = {}
    blocks = []
    for step in range(60):
        made.batch.submit(arrivals.get(step, []))
        if (report := made.step()) is None:
            continue
        assert report.failed == ()
        if report.sample is not None:
            blocks.append((report.sample.blocks, report.sample.skipped_blocks))
        final |= {row.key.job_id: row.latent for row in report.advanced if row.done}
    return final, blocks


def test_a_row_whose_output_is_extrapolated_leaves_the_sample_to_others() -> None:
    rule = taylor(interval=3, order=1, warmup=1)
    beside, alone = engine(OF), engine(OF)
    rows = [
        cached(tiny_flux.row(OF, Spec("t", steps=6)), rule),
        tiny_flux.row(OF, Spec("o", steps=6, seed=1)),
    ]
    _, blocks = run(beside, {0: rows})
    computed = [rule.steps.computes(step) for step in range(6)]
    assert computed == [True, False, True, False, False, True]
    assert blocks == [(2 * BLOCKS, 0) if now else (BLOCKS, BLOCKS) for now in computed]
    _, blocks = run(alone, {0: rows[:1]})
    assert blocks == [(BLOCKS, 0)] * 3, "a step that computes nothing has no sample"


def test_steps_that_others_take_from_are_computed() -> None:
    never = taylor(interval=100, order=1, warmup=0)
    made = engine(OF)
    made.batch.submit([cached(changed(edit(OF, None, Spec(grid=GRID, steps=9)), renewed_every=4), never)])
    computed = [report.sample is not None for report in iter(made.step, None)]
    assert [step for step, now in enumerate(computed) if now] == [0, 1, 4, 8]  # the rule's own is the step 1


def test_what_is_remembered_says_nothing_of_other_loras_first_steps_that_others_take_from_and_recordings() -> (
    None
):
    output = torch.zeros(1, 12, 64)
    known = TaylorExpansion(0, 3, (output,))
    rule = taylor(100, 1, 1)
    row = replace(cached(tiny_flux.row(OF, Spec(steps=9)), replace(rule, known=known)), step=4, degree=1)
    assert extrapolated(row, learns=True) is known
    assert extrapolated(replace(row, degree=0), learns=True) is known, (
        "it has brought along what it remembers"
    )
    late = replace(row, adapters=Adapters((RowLora("l"),), loras_from=4))
    recording = RecordingSpec(frozenset({CacheForm.KV}), EXACT)
    for other in (
        late,
        changed(row, degree=0, prefix=(3,)),
        replace(row, degree=0, region=edit(OF, None, Spec(grid=GRID)).region),
        replace(row, step_cache=rule),
        replace(row, records=recording),
    ):
        assert extrapolated(other, learns=True) is None
    uncorrected = changed(row, region=edit(OF, None, Spec(grid=GRID)).region, template=template(OF))
    assert extrapolated(uncorrected, learns=True) is None
    assert extrapolated(uncorrected, learns=False) is known


def test_a_row_that_goes_on_elsewhere_begins_its_cache_again() -> None:
    rule = TAYLOR
    spec = Spec(steps=12)
    made = engine(OF)
    made.batch.submit([cached(tiny_flux.row(OF, spec), rule)])
    for _ in range(5):
        made.step()
    (row,) = made.batch.take_all()
    assert row.cached is not None
    resumed = cached(tiny_flux.row(OF, spec, row.export()), rule)
    assert resumed.cached is None
    _, blocks = run(engine(OF), {0: [resumed]})
    assert blocks[0] == (BLOCKS, 0)
    assert len(blocks) == spec.steps - 5 - rule.steps.skipped(spec.steps - 5)


@pytest.mark.parametrize(
    ("rule", "scale", "masked"), [(taylor(3, 0, 1), 1.0, True), (taylor(4, 2, 4), 2.0, False)]
)
def test_memory_counts_what_is_remembered(rule: TaylorRule, scale: float, *, masked: bool) -> None:
    spec = Spec(grid=GRID, steps=8, true_cfg_scale=scale)
    row = cached(changed(edit(OF, None, spec), renewed_every=3) if masked else tiny_flux.row(OF, spec), rule)
    counted = row_bytes(row, OF, None) - row_bytes(cached(row, None), OF, None)
    assert counted == cache_bytes(row) > 0
    made, held = engine(OF), 0
    made.batch.submit([row])
    while (report := made.step()) is not None:
        (after,) = report.advanced
        held = max(held, present(after.cached).size_bytes)
    assert held == counted


def test_a_failed_step_is_repeated_as_it_was() -> None:
    """A step that one row fails is computed again row by row: what rows remember is that of the step before."""
    of = exact_family()
    row = cached(tiny_flux.row(of, Spec("good", steps=9)), TAYLOR)
    alone, _ = run(engine(of), {0: [row]})
    made = Engine(of, ROOMY, lambda: 0.0)
    bad = tiny_flux.row(of, Spec("bad", steps=9, seed=3))
    bad = replace(bad, adapters=Adapters((RowLora("missing"),), loras_from=4))
    made.batch.submit([row, bad])
    final: dict[str, Tensor] = {}
    failed: list[str] = []
    while (report := made.step()) is not None:
        failed += [failure.row.key.job_id for failure in report.failed]
        final |= {each.key.job_id: each.latent for each in report.advanced if each.done}
    assert failed == ["bad"]
    torch.testing.assert_close(final["good"], alone["good"], atol=TOLERANCE, rtol=0)
