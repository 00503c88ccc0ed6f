"""What one edit has learned serves others of its template and mask: no step of theirs is computed in full."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from giornata.packed.tracing import TraceLane
from giornata.planning.costs import StepCosts
from giornata_denoiser.attempts.inputs import reused
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.loading import FinishedSlabLoad, Loader, SlabRun
from giornata_denoiser.engine.weighing import slab_bytes
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.corrections import CorrectionCache
from giornata_denoiser.templates.lookup import TemplateReuse
from giornata_denoiser.trace import Trace
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import (
    FORMS,
    GRID,
    edit,
    engine,
    expected,
    finished,
    preferred_modes,
    template,
    where,
)
from tests.unit.denoiser.engine.test_masked import BLOCKS, FLOAT32

OF = tiny_flux.family()


def learned(teacher: Row, bits: int = EXACT) -> tuple[Correction, ...]:
    made = engine(OF, correction_bits=bits)
    made.batch.submit([teacher])
    report = made.step()
    assert report is not None
    (taught,) = report.advanced
    assert taught.taught
    assert taught.corrections is not None
    return taught.corrections


@pytest.mark.slow
@pytest.mark.parametrize("forms", FORMS[:3])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_edits_take_what_another_one_has_learned(forms: frozenset[CacheForm], scale: float) -> None:
    """Edits of any seed, prompt and number of steps, beside each other and one that learns for itself."""
    taken = template(OF, forms)
    spec = Spec("teacher", grid=GRID, steps=5, text_tokens=3, true_cfg_scale=scale, seed=9)
    teacher = edit(OF, taken, spec)
    known = learned(teacher)
    pupils = [
        replace(
            edit(OF, taken, replace(spec, job_id=f"p{seed}", seed=seed, steps=steps, text_tokens=tokens)),
            corrections=known,
        )
        for seed, steps, tokens in ((1, 5, 3), (2, 1, 3), (3, 7, 4))
    ]
    alone = edit(OF, taken, replace(spec, job_id="alone", seed=4))
    made = engine(OF, correction_bits=EXACT)
    made.batch.submit([*pupils, alone])
    ended = finished(made)
    modes = preferred_modes(forms)
    for pupil in pupils:
        wanted = expected(OF, pupil, taken, modes, corrected=True, teacher=teacher)
        torch.testing.assert_close(ended[pupil.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)
    wanted = expected(OF, alone, taken, modes, corrected=True)
    torch.testing.assert_close(ended["alone"].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("forms", FORMS[:3])
def test_an_edit_takes_what_one_of_a_neighbouring_mask_has_learned(forms: frozenset[CacheForm]) -> None:
    """It computes what lies in either mask; outside of both it takes what the other one has learned there."""
    taken = template(OF, forms)
    teacher = edit(OF, taken, Spec("teacher", grid=GRID, steps=5, seed=9))
    kept = CorrectionCache(1 << 30)
    assert kept.claim(replace(teacher, corrections=learned(teacher)))
    kept.keep(replace(teacher, corrections=learned(teacher)))
    costs = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    how = TemplateReuse(1.0, taken, costs, known=kept)
    place = where((5, 6))
    spec = Spec("pupil", grid=GRID, steps=4, seed=3)
    pupil = reused(tiny_flux.row(OF, spec), place, how, OF)
    assert pupil.region is not None
    assert pupil.region.computed.tolist() == [0, 5, 6, 10, 15]
    assert pupil.settled
    made = engine(OF, correction_bits=EXACT)
    made.batch.submit([pupil])
    wanted = expected(OF, pupil, taken, preferred_modes(forms), corrected=True, teacher=teacher)
    torch.testing.assert_close(finished(made)["pupil"].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_mask_far_away_is_not_worth_computing_beside_ones_own() -> None:
    taken = template(OF)
    teacher = edit(OF, taken, Spec("teacher", grid=GRID, steps=5), where(tuple(range(5))))
    kept = CorrectionCache(1 << 30)
    assert kept.claim(replace(teacher, corrections=learned(teacher)))
    kept.keep(replace(teacher, corrections=learned(teacher)))
    how = TemplateReuse(1.0, taken, StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)), known=kept)
    for steps, alone in ((3, False), (4, True)):  # 3 tokens more in each step, or 12 more in the first
        row = tiny_flux.row(OF, Spec(grid=GRID, steps=steps, text_tokens=0))
        found = reused(row, where((3, 4, 5, 6)), how, OF)
        assert found.region is not None
        assert (found.corrections is None) is alone
        assert len(found.region.computed) == (4 if alone else 7)


def test_no_step_is_computed_in_full_and_equal_edits_load_once(tmp_path: Path) -> None:
    taken = template(OF)
    known = learned(edit(OF, taken, Spec("teacher", grid=GRID, steps=4)))
    loads = []
    for count in (1, 3):
        trace = Trace(OF.device)
        made = engine(OF, correction_bits=EXACT, trace=trace)
        rows = [edit(OF, taken, Spec(f"e{i}", grid=GRID, steps=4, seed=i)) for i in range(count)]
        made.batch.submit([replace(row, corrections=known) for row in rows])
        while (report := made.step()) is not None:
            assert report.sample is not None
            assert report.sample.image_tokens == count * rows[0].computed_tokens
        trace.write(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        loads.append(sum(event.get("cat") == TraceLane.LOAD for event in events))
    assert loads == [BLOCKS * len(taken.entries)] * 2


def test_an_engine_that_does_not_correct_leaves_aside_what_a_row_brings() -> None:
    taken = template(OF)
    row = edit(OF, taken, Spec("edit", grid=GRID, steps=4))
    known = learned(row)
    plain = []
    for corrections in (None, known):
        made = engine(OF, correction_bits=None)
        made.batch.submit([replace(row, corrections=corrections)])
        plain.append(finished(made)["edit"].latent)
    assert torch.equal(*plain)


def test_what_was_learned_is_kept_in_the_bits_that_are_asked_for() -> None:
    row = edit(OF, template(OF), Spec("edit", grid=GRID, steps=4))
    exact, half = (learned(row, bits)[0] for bits in (EXACT, 4))
    assert half.size_bytes < exact.size_bytes / 2
    assert (
        half.deltas.keys() == exact.deltas.keys() == {(b, p) for b in range(BLOCKS) for p in ("key", "value")}
    )


@pytest.mark.parametrize("blocks", range(BLOCKS + 1))
def test_of_the_next_entry_as_many_blocks_are_loaded_ahead_as_fit(blocks: int) -> None:
    taken = template(OF, steps=2)
    row = edit(OF, taken, Spec("edit", grid=GRID, steps=2))
    row = replace(row, corrections=learned(row))
    loads: list[tuple[int, int]] = []
    all_loaded = threading.Event()

    def loaded(done: FinishedSlabLoad) -> None:
        loads.append((taken.entries.index(done.load.slabs.entry), done.load.block))
        if len(loads) == BLOCKS + blocks:
            all_loaded.set()

    room = slab_bytes(row, OF.dtype.itemsize) * blocks // BLOCKS
    with Loader(on_loaded=loaded) as loader:
        made = engine(OF, correction_bits=EXACT, loader=loader, ahead_bytes=room)
        made.batch.submit([row])
        made.step()
        assert all_loaded.wait(20)
        assert loads == [(0, b) for b in range(BLOCKS)] + [(1, b) for b in range(blocks)]
        assert finished(made)["edit"].done


class Counting(Loader):
    """Counts how often it is told what to load."""

    asked = 0

    def schedule(self, groups: Iterable[Sequence[SlabRun]]) -> None:
        self.asked += 1
        super().schedule(groups)


def test_steps_that_change_nothing_ask_the_loader_for_nothing() -> None:
    """The bookkeeping of such a step is small: with 57 blocks and eight rows it was most of it."""
    taken = template(OF, steps=2)
    row = edit(OF, taken, Spec("edit", grid=GRID, steps=40))
    with Counting() as loader:
        made = engine(OF, correction_bits=EXACT, loader=loader)
        made.batch.submit([replace(row, corrections=learned(row))])
        assert finished(made)["edit"].done
    assert 2 <= loader.asked < 10
