"""What rows weigh and which share a step, and a device that keeps no slabs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from giornata.packed.attention import KVPages
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.slabs import Device, Slabs
from giornata_denoiser.engine.step_budget import (
    StepBudget,
    correction_bytes,
    row_bytes,
    slab_bytes,
    step_bytes,
)
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import FORMS, GRID, edit, engine, finish_rows, template, where
from tests.unit.denoiser.engine.test_masked import BLOCKS, OF

# A device that keeps no slabs: blocks gather entries as they are stored, and rows come to the same
# pictures.


FLOAT32 = 1e-5


class Unkept(Device):
    keeps = False


@pytest.mark.parametrize(
    ("forms", "corrected", "ahead"),
    [(FORMS[0], True, True), (FORMS[0], False, False), (FORMS[1], True, False)],
)
def test_pictures_are_those_of_kept_slabs(forms: frozenset[CacheForm], corrected: bool, ahead: bool) -> None:
    taken = template(OF, forms, steps=3)
    bits = EXACT if corrected else None
    rows = [
        edit(OF, taken, Spec("a", grid=GRID, steps=6, seed=1)),
        edit(OF, taken, Spec("b", grid=GRID, steps=4, seed=2, true_cfg_scale=2.0), where((1, 2, 3))),
        changed(edit(OF, taken, Spec("c", grid=GRID, steps=5, seed=3)), region=None, template=None),
    ]
    ended = []
    for device in (Device(), Unkept()):
        with Loader() as loader:
            ended.append(
                finish_rows(OF, rows, device=device, correction_bits=bits, loader=loader if ahead else None)
            )
    for name in "abc":
        kept, unkept = (each[name].latent for each in ended)
        torch.testing.assert_close(unkept, kept, atol=FLOAT32, rtol=0)


def test_nothing_is_held_but_the_entry() -> None:
    taken = template(OF)
    for device, held in ((Unkept(), True), (Device(), False)):
        slabs = Slabs(taken.entries[0], where(), 3, OF, device=device)
        found = slabs.keys_values(1)
        assert isinstance(found, KVPages) is held
        key = found.key.data if isinstance(found, KVPages) else found.key
        stored = present(taken.entries[0].blocks[1].key)
        assert (key.data_ptr() == stored.data.data_ptr()) is held
    sizes = Slabs(taken.entries[0], where(), 3, OF, device=Unkept()).sizes(BlockMode.KV)
    assert sizes.sum() == taken.entries[0].size_bytes


# Which rows share a step: by memory, time and number.


ADMISSIONS = 250


def rows_of_any_weight(of: ModelFamily, taken: CachedTemplate) -> Iterator[Row]:
    draw = random.Random(0)  # noqa: S311 - no secrets
    for number in range(ADMISSIONS):
        spec = Spec(f"r{number}", grid=GRID, steps=draw.randint(1, 3), true_cfg_scale=draw.choice([1.0, 2.0]))
        tokens = draw.sample(range(16), draw.randint(1, 15))
        yield edit(of, taken if draw.random() < 0.7 else None, spec, where(tokens))


@pytest.mark.slow
def test_memory_stays_within_its_budget_over_hundreds_of_admissions() -> None:
    taken = template(OF)
    rows = list(rows_of_any_weight(OF, taken))
    held = StepBudget(activation_bytes=1000.0, correction_bits=8)
    most = 4 * max(step_bytes([row], held, OF) for row in rows)
    made = engine(OF, budget=replace(held, memory_bytes=most))
    made.batch.submit(rows)
    fullest, admitted = 0, set()
    while joined := made.plan():
        admitted |= {row.key for row in joined}
        assert step_bytes(joined, held, OF) <= most
        fullest = max(fullest, len(joined))
        made.batch.settle(
            [row.advanced(row.latent) for row in joined], [r.key for r in joined if r.step + 1 >= r.steps]
        )
    assert len(admitted) == ADMISSIONS
    assert fullest > 4


def test_what_is_counted_is_what_is_held() -> None:
    row = edit(OF, template(OF), Spec("edit", grid=GRID, steps=6, true_cfg_scale=2.0, text_tokens=7))
    slabs = (
        [Slabs(row.reuse.template.entries[0], row.region, own, OF) for own in row.own_tokens]
        if row.reuse.template and row.region
        else []
    )
    held = [slab.gathered(block) for slab in slabs for block in range(BLOCKS)]
    assert slab_bytes(row, 4) == sum(each.key.nbytes + each.value.nbytes for each in held) > 0
    for bits in (EXACT, 8, 4):
        made = engine(OF, correction_bits=bits)
        made.batch.submit([row])
        report = present(made.step())
        (taught,) = report.advanced
        learned = sum(each.size_bytes for each in taught.reuse.corrections or ())
        assert correction_bytes(taught, 4, bits) == correction_bytes(row, 4, bits) == learned > 0
    assert correction_bytes(row, 4, None) == 0
    run = replace(tiny_flux.row(OF, Spec("run", grid=GRID, steps=3)), records=RecordingSpec(FORMS[0], EXACT))
    recorded = template(OF, steps=3).size_bytes
    assert row_bytes(run, OF, 8) - row_bytes(replace(run, records=None), OF, 8) == recorded


def test_activations_are_those_of_equal_sequences_while_rows_stay_equally_long() -> None:
    budget, taken = StepBudget(activation_bytes=2000.0, even_bytes=1000.0), template(OF)

    def each(*rows: Row) -> int:
        added = step_bytes(rows, budget, OF) - step_bytes(rows, StepBudget(), OF)
        return round(added / sum(row.tokens for row in rows))

    whole, other = (tiny_flux.row(OF, Spec(name, grid=GRID, steps=3)) for name in ("a", "b"))
    assert each(whole) == each(whole, other) == each(whole, replace(other, step=1)) == 1000
    assert each(whole, tiny_flux.row(OF, Spec("c", grid=GRID, text_tokens=7))) == 2000
    assert each(changed(whole, companions=1)) == 2000, "they may be modulated apart"
    first, second, larger = (
        edit(OF, taken, Spec(name, grid=GRID, steps=3), where(tokens))
        for name, tokens in (("a", [1, 2]), ("b", [5, 6]), ("c", [1, 2, 3]))
    )
    assert each(first, second) == 1000
    assert each(first, replace(second, degree=1, step=1)) == 2000, "one computes all, one its region"
    assert each(first, whole) == each(first, larger) == 2000, "they will"
    assert step_bytes([whole], replace(budget, even_bytes=None), OF) > step_bytes([whole], budget, OF)


def test_what_is_prepared_of_a_row_is_counted() -> None:
    short, long = (tiny_flux.row(OF, Spec(steps=steps, true_cfg_scale=2.0)) for steps in (3, 7))
    held = [
        sum(cast("Tensor", sequence.prepared).nbytes for sequence in place_inputs(row, OF).sequences)
        for row in (short, long)
    ]
    assert row_bytes(long, OF, None) - row_bytes(short, OF, None) == held[1] - held[0] > 0
    assert held[0] == 2 * 3 * OF.network.prepared_bytes


def test_what_is_loaded_ahead_counts_once_for_all_rows() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(f"r{i}", grid=GRID)) for i in range(3)]
    alone, entry = step_bytes(rows, StepBudget(), OF), sum(slab_bytes(row, 4) for row in rows)
    assert step_bytes(rows, StepBudget(ahead_bytes=100), OF) - alone == 100
    assert step_bytes(rows, StepBudget(ahead_bytes=1e12), OF) - alone == entry
