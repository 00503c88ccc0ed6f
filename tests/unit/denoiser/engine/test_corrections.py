"""What one edit has learned or left serves the next ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.packed.packing import TraceLane, unite_regions
from giornata.planning.operations import StepCosts
from giornata.wire.values import BlockMode
from giornata_denoiser.attempts.inputs import TemplateReuse, with_reuse
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.loading import FinishedSlabLoad, Loader, SlabRun
from giornata_denoiser.engine.step_budget import recorded_bytes, row_bytes, slab_bytes
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_denoiser.templates.store import CorrectionCache
from giornata_denoiser.trace import Trace
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import (
    FORMS,
    GRID,
    edit,
    engine,
    expected,
    finish_rows,
    finished,
    preferred_modes,
    template,
    where,
)
from tests.unit.denoiser.engine.test_masked import BLOCKS, FLOAT32, OF, Everything, recorded, reusing, step
from tests.unit.denoiser.engine.test_renewing import Hiccup

# What one edit has learned serves others of its template and mask: no step of theirs is computed in full.


def learned(teacher: Row, bits: int = EXACT) -> tuple[Correction, ...]:
    made = engine(OF, correction_bits=bits)
    made.batch.submit([teacher])
    report = present(made.step())
    (taught,) = report.advanced
    assert taught.reuse.taught
    return present(taught.reuse.corrections)


@pytest.mark.slow
@pytest.mark.parametrize(("forms", "scale"), [(FORMS[0], 2.0), (FORMS[1], 1.0)])
def test_edits_take_what_another_one_has_learned(forms: frozenset[CacheForm], scale: float) -> None:
    """Edits of any seed, prompt and number of steps, beside each other and one that learns for itself."""
    taken = template(OF, forms)
    spec = Spec("teacher", grid=GRID, steps=5, text_tokens=3, true_cfg_scale=scale, seed=9)
    teacher = edit(OF, taken, spec)
    known = learned(teacher)
    pupils = [
        changed(
            edit(OF, taken, replace(spec, job_id=f"p{seed}", seed=seed, steps=steps, text_tokens=tokens)),
            corrections=known,
        )
        for seed, steps, tokens in ((1, 5, 3), (2, 1, 3), (3, 7, 4))
    ]
    alone = edit(OF, taken, replace(spec, job_id="alone", seed=4))
    ended = finish_rows(OF, [*pupils, alone], correction_bits=EXACT)
    modes = preferred_modes(forms)
    for pupil in pupils:
        wanted = expected(OF, pupil, taken, modes, corrected=True, teacher=teacher)
        torch.testing.assert_close(ended[pupil.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)
    wanted = expected(OF, alone, taken, modes, corrected=True)
    torch.testing.assert_close(ended["alone"].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("forms", FORMS[:2])
def test_an_edit_takes_what_one_of_a_neighbouring_mask_has_learned(forms: frozenset[CacheForm]) -> None:
    """It computes what lies in either mask; outside of both it takes what the other one has learned there."""
    taken = template(OF, forms)
    teacher = edit(OF, taken, Spec("teacher", grid=GRID, steps=5, seed=9))
    kept = CorrectionCache(1 << 30)
    assert kept.claim(changed(teacher, corrections=learned(teacher)))
    kept.keep(changed(teacher, corrections=learned(teacher)))
    costs = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    how = TemplateReuse(1.0, taken, costs, known=kept)
    place = where((5, 6))
    spec = Spec("pupil", grid=GRID, steps=4, seed=3)
    pupil = with_reuse(tiny_flux.row(OF, spec), place, how, OF)
    assert present(pupil.region).computed.tolist() == [0, 5, 6, 10, 15]
    assert pupil.settled
    made = engine(OF, correction_bits=EXACT)
    made.batch.submit([pupil])
    wanted = expected(OF, pupil, taken, preferred_modes(forms), corrected=True, teacher=teacher)
    torch.testing.assert_close(finished(made)["pupil"].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_mask_far_away_is_not_worth_computing_beside_ones_own() -> None:
    taken = template(OF)
    teacher = edit(OF, taken, Spec("teacher", grid=GRID, steps=5), where(tuple(range(5))))
    kept = CorrectionCache(1 << 30)
    assert kept.claim(changed(teacher, corrections=learned(teacher)))
    kept.keep(changed(teacher, corrections=learned(teacher)))
    how = TemplateReuse(1.0, taken, StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)), known=kept)
    for steps, alone in ((3, False), (4, True)):  # 3 tokens more in each step, or 12 more in the first
        row = tiny_flux.row(OF, Spec(grid=GRID, steps=steps, text_tokens=0))
        found = with_reuse(row, where((3, 4, 5, 6)), how, OF)
        assert (found.reuse.corrections is None) is alone
        assert len(present(found.region).computed) == (4 if alone else 7)


def test_no_step_is_computed_in_full_and_equal_edits_load_once(tmp_path: Path) -> None:
    taken = template(OF)
    known = learned(edit(OF, taken, Spec("teacher", grid=GRID, steps=4)))
    loads = []
    for count in (1, 3):
        trace = Trace(OF.device)
        made = engine(OF, correction_bits=EXACT, trace=trace)
        rows = [edit(OF, taken, Spec(f"e{i}", grid=GRID, steps=4, seed=i)) for i in range(count)]
        made.batch.submit([changed(row, corrections=known) for row in rows])
        while (report := made.step()) is not None:
            assert present(report.sample).image_tokens == count * rows[0].computed_tokens
        trace.write(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        loads.append(sum(event.get("cat") == TraceLane.LOAD for event in events))
    assert loads == [BLOCKS * len(taken.entries)] * 2


def test_an_engine_that_does_not_correct_leaves_aside_what_a_row_brings() -> None:
    taken = template(OF)
    row = edit(OF, taken, Spec("edit", grid=GRID, steps=4))
    known = learned(row)
    rows = [changed(row, corrections=corrections) for corrections in (None, known)]
    assert torch.equal(*[finish_rows(OF, [each], correction_bits=None)["edit"].latent for each in rows])


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
    row = changed(row, corrections=learned(row))
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
        assert finish_rows(
            OF, [changed(row, corrections=learned(row))], correction_bits=EXACT, loader=loader
        )["edit"].done
    assert 2 <= loader.asked < 10


# Edits without a template leave what their steps in full make; the picture's next edits take it.


KV = (BlockMode.KV,) * BLOCKS
SPEC = RecordingSpec(frozenset({CacheForm.KV}), EXACT, name="pic-left")
COSTS = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
ROOM = 1 << 30


def leaving(spec: Spec, every: int = 3, **how: Any) -> Row:
    return changed(edit(OF, None, spec), renewed_every=every, records=SPEC, **how)


def left_by(row: Row) -> CachedTemplate:
    done = finish_rows(OF, [row])[row.key.job_id]
    return CachedTemplate("left", row.grid, done.entries, edited=row.region)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_edit_leaves_its_steps_in_full_and_is_what_it_was(scale: float) -> None:
    """With guidance they are those of the unguided half."""
    row = leaving(Spec(grid=GRID, steps=7, true_cfg_scale=scale))
    done = finish_rows(OF, [row, tiny_flux.row(OF, Spec("beside"))])["job"]
    at, seen = row, list[Everything]()
    levels = []
    while not at.done:
        if at.step % 3 == 0:
            levels.append(at.level)
            latent, everything = recorded(OF, at)
            entry = done.entries[len(levels) - 1]
            for block, (key, value) in everything[-1].heads.items():
                kept = entry.blocks[block]
                torch.testing.assert_close(present(kept.key).data, key.flatten(1), atol=FLOAT32, rtol=0)
                torch.testing.assert_close(present(kept.value).data, value.flatten(1), atol=FLOAT32, rtol=0)
            seen = everything
        else:
            (latent,) = step(OF, [at], reusing(at, seen, KV, room=False))
        at = at.advanced(latent)
    assert [entry.level for entry in done.entries] == levels
    torch.testing.assert_close(done.latent, at.latent, atol=FLOAT32, rtol=0)


def test_an_edit_that_failed_on_the_way_leaves_nothing_more() -> None:
    done = finish_rows(tiny_flux.family(Hiccup(2)), [leaving(Spec(grid=GRID, steps=7))])["job"]
    assert done.records is None
    assert not done.entries


def test_what_it_leaves_is_weighed() -> None:
    row = leaving(Spec(grid=GRID, steps=7))
    level = 2 * BLOCKS * 16 * 64 * 4
    assert recorded_bytes(row, OF) == 3 * level
    assert recorded_bytes(row, OF, 2) == 2 * level
    assert row_bytes(row, OF, None) - row_bytes(replace(row, records=None), OF, None) == 3 * level


@pytest.mark.parametrize(("steps", "every"), [(20, 7), (7, 3), (6, 2), (30, 7), (8, 3), (1, 1)])
def test_rows_that_begin_together_renew_in_different_steps_and_as_often(steps: int, every: int) -> None:
    """Not all of them at once, where their last such step can come later."""
    costs = TemplateReuse(1.0, None, COSTS, every)
    rows = [
        with_reuse(tiny_flux.row(OF, Spec(grid=GRID, steps=steps, index=i)), where(), costs, OF)
        for i in range(8)
    ]
    if steps == 1:
        assert not any(row.reuse.renewed_every for row in rows)
        return
    whole = [
        {at for at in range(steps) if not replace(row, step=at, degree=min(at, 1)).masked} for row in rows
    ]
    assert {len(each) for each in whole} == {rows[0].steps_in_full} == {len(whole[0])}
    assert rows[0].reuse.renewed_later == max(row.reuse.renewed_later for row in rows), (
        "late is nearer to full computation"
    )
    together = set.intersection(*whole)
    assert together == ({0} if (steps, every) in {(20, 7), (30, 7), (8, 3)} else whole[0])
    for each in whole:
        gaps = [b - a for a, b in zip(sorted(each), [*sorted(each)[1:], steps], strict=True)]
        assert max(gaps) <= every + (every - 1) // 2


def test_a_row_that_renews_later_takes_what_it_last_made() -> None:
    row = changed(leaving(Spec(grid=GRID, steps=8)), renewed_later=1)
    done = finish_rows(OF, [row])["job"]
    at, seen = row, list[Everything]()
    while not at.done:
        if at.step in {0, 4, 7}:
            latent, seen = recorded(OF, at)
        else:
            (latent,) = step(OF, [at], reusing(at, seen, KV, room=False))
        at = at.advanced(latent)
    torch.testing.assert_close(done.latent, at.latent, atol=FLOAT32, rtol=0)
    assert len(done.entries) == row.steps_in_full == 3


def missing(**how: Any) -> TemplateReuse:
    return TemplateReuse(1.0, None, COSTS, 7, leaves=SPEC, room_bytes=ROOM, **how)


def test_a_miss_leaves_what_there_is_room_for() -> None:
    row = tiny_flux.row(OF, Spec(grid=GRID, steps=20))
    found = with_reuse(row, where(), missing(), OF)
    assert (found.records, found.background) == (SPEC, False)
    size = recorded_bytes(found, OF)
    assert size == 3 * 2 * BLOCKS * 16 * 64 * 4
    for how, other in (
        (replace(missing(), room_bytes=size - 1), row),
        (replace(missing(), leaves=None), row),
        (replace(missing(), renew_steps=0), row),
        (missing(), replace(row, step=3)),
    ):
        assert with_reuse(other, where(), how, OF).records is None


def test_the_next_edit_computes_what_the_earlier_one_repainted() -> None:
    """Where that is not too much: else it does without."""
    left = replace(left_by(leaving(Spec(grid=GRID, steps=7))), edited=where((6, 7)))
    row = tiny_flux.row(OF, Spec(grid=GRID, steps=20))
    how = replace(missing(), recording=left, leaves=None, known=CorrectionCache(1 << 20))
    found = with_reuse(row, where((5, 6)), how, OF)
    either = unite_regions(where((5, 6)), where((6, 7)))
    assert found.reuse.template is left
    assert present(found.region).digest == present(either).digest
    # 14 of 16 tokens in 19 of 20 steps are more than 2 in 17; or nothing is left to take.
    for edited in (where(tuple(range(2, 14))), where(tuple(i for i in range(16) if i not in {5, 6}))):
        found = with_reuse(row, where((5, 6)), replace(how, recording=replace(left, edited=edited)), OF)
        assert (found.reuse.template, found.reuse.renewed_every, found.reuse.skipped) == (None, 7, True)


def test_what_a_next_edit_learns_serves_others_of_either_mask() -> None:
    left = replace(left_by(leaving(Spec(grid=GRID, steps=7))), edited=where((6, 7)))
    known = CorrectionCache(1 << 20)
    how = replace(missing(), recording=left, leaves=None, known=known)
    spec = Spec(grid=GRID, steps=20)
    made = engine(OF, correction_bits=EXACT)
    made.batch.submit([with_reuse(tiny_flux.row(OF, spec), where((5, 6)), how, OF)])
    taught = next(row for row in made.step().advanced if row.reuse.taught)  # type: ignore[union-attr]  # it steps
    assert known.claim(taught)
    known.keep(taught)
    again = with_reuse(tiny_flux.row(OF, replace(spec, seed=5)), where((5, 6)), how, OF)
    assert again.reuse.corrections == taught.reuse.corrections
    assert again.steps_in_full == 0
