"""Loads beside the computing: whoever reads them reads them whole, whatever lags, leaves or is reused meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.loading import Loader, device_for
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.lab.gpu.engines import FLOAT32, GRID, edit, family, finished, lagging, latents, template
from tests.unit.denoiser.engine import edits

KV = frozenset({CacheForm.KV})
ENTRIES, STEPS = 6, 6


def rows_of(of: ModelFamily, taken: CachedTemplate, names: str, steps: int = STEPS) -> list[Row]:
    """Each with a mask of its own; every step is served by another entry."""
    return [edit(of, taken, Spec(name, steps=steps, seed=seed)) for seed, name in enumerate(names)]


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30], ids=["copies go", "copies stay"])
@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "corrected"])
@pytest.mark.parametrize("forms", [KV, frozenset({CacheForm.HIDDEN})], ids=["kv", "hidden"])
def test_steps_that_load_equal_those_with_everything_resident(
    device: torch.device, forms: frozenset[CacheForm], bits: int | None, budget_bytes: int
) -> None:
    """Several rows, every step another entry, and a copy stream that lags behind all of them."""
    of = family(device)
    taken = template(of, forms, steps=ENTRIES)
    rows = rows_of(of, taken, "abc")
    wanted = latents(finished(of, rows, correction_bits=bits))
    with Loader() as loader:
        late = lagging(device, budget_bytes)
        found = latents(finished(of, rows, late, loader=loader, correction_bits=bits))
    for name in "abc":
        torch.testing.assert_close(found[name], wanted[name], atol=FLOAT32, rtol=0)


def test_corrections_come_over_the_copy_stream(device: torch.device) -> None:
    """Those that an earlier edit taught, from pinned memory as a denoiser keeps them, and from where they were made."""
    of = family(device)
    taken = template(of, KV, steps=ENTRIES)
    (teacher,) = rows_of(of, taken, "a")
    known = taught(of, teacher)
    pupils = [changed(teacher, corrections=known)]
    wanted = latents(finished(of, pupils))["a"]
    untaught = latents(finished(of, [teacher], correction_bits=None))["a"]
    kept = [correction.pinned() for correction in known] if device.type == "cuda" else known
    for corrections in (known, tuple(kept)):
        with Loader() as loader:
            row = changed(teacher, corrections=corrections)
            found = latents(finished(of, [row], lagging(device), loader=loader))["a"]
        torch.testing.assert_close(found, wanted, atol=FLOAT32, rtol=0)
    assert (wanted - untaught).abs().max() > 10 * FLOAT32, "corrections change something"


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_rows_cancelled_while_copies_are_under_way_leave_the_others_as_they_were(
    device: torch.device, after_steps: int
) -> None:
    """What the copy stream still writes for them is not given to anybody else before it has."""
    of = family(device)
    taken = template(of, KV, steps=ENTRIES)
    stays, *leave = rows_of(of, taken, "abc")
    comes = edit(of, taken, Spec("d", steps=STEPS, seed=9))
    wanted = latents(finished(of, [stays, comes], device_for(device, 1 << 30)))
    with Loader() as loader:
        engine = edits.engine(of, device=lagging(device), loader=loader)
        engine.batch.submit([stays, *leave])
        for _ in range(after_steps):
            engine.step()
        for row in leave:
            engine.batch.cancel(row.key.job_id)
        engine.batch.submit([comes])
        found = latents(edits.finished(engine))
    assert set(found) == {"a", "d"}
    for name, latent in found.items():
        torch.testing.assert_close(latent, wanted[name], atol=FLOAT32, rtol=0)


def test_a_template_recorded_beside_edits_is_the_one_recorded_alone(device: torch.device) -> None:
    """Its entries leave for the host while other rows compute and load."""
    of = family(device)
    taken = template(of, KV, steps=ENTRIES)
    run = tiny_flux.row(of, Spec("run", grid=GRID, steps=ENTRIES))
    run = replace(run, records=RecordingSpec(KV, 8))
    with Loader() as loader:
        engine = edits.engine(of, device=lagging(device), loader=loader)
        engine.batch.submit([*rows_of(of, taken, "a"), run])
        ended = edits.finished(engine)
    again = CachedTemplate("again", GRID, ended["run"].entries)
    (row,) = rows_of(of, taken, "b")
    wanted, found = (
        latents(finished(of, [changed(row, template=each)], correction_bits=None))["b"]
        for each in (taken, again)
    )
    torch.testing.assert_close(found, wanted, atol=10 * FLOAT32, rtol=0)  # a level may round the other way


def taught(of: ModelFamily, row: Row) -> tuple[Correction, ...]:
    """What the first step of `row` learns, where it was made."""
    engine = edits.engine(of, device=device_for(of.device, 1 << 30))
    engine.batch.submit([row])
    report = engine.step()
    assert report is not None
    corrections = report.advanced[0].reuse.corrections
    assert corrections is not None
    return corrections
