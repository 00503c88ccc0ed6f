"""Rows under LoRAs in an engine: each as alone, never without a set that is to act, and corrected under its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.wire.errors import InternalError
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.batch_tensors import LowRanks
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.store import CorrectionCache
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, ROOMY, edit, template
from tests.unit.denoiser.engine.test_masked import exact_family

ONE, TWO = RowLora("one", 1.0), RowLora("two", 0.5)
SETS = ((), (ONE,), (ONE, TWO))
EXACTLY = 1e-5


class LoraSetStore:
    """A store of sets; satisfies :class:`LowRanks`."""

    def __init__(self, sets: Mapping[tuple[RowLora, ...], SequenceLoras]) -> None:
        self.sets = dict(sets)

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self.sets.get(loras)


@pytest.fixture(scope="module")
def of() -> ModelFamily:
    return exact_family()


@pytest.fixture(scope="module")
def shelf(of: ModelFamily) -> LoraSetStore:
    """Random sets of every layer of the blocks."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, Tensor]:
        made = {}
        for path, layer in of.network.transformer.named_modules():  # type: ignore[attr-defined]  # of Flux
            if isinstance(layer, torch.nn.Linear):
                shapes = {"down": (4, layer.in_features), "up": (layer.out_features, 4)}
                for part, shape in shapes.items():
                    made[f"{path}.{part}"] = 0.1 * torch.randn(shape, generator=generator).double()
        return made

    loras = {ONE: tensors(), TWO: tensors()}
    return LoraSetStore(
        {each: low_rank(str(each), [(loras[lora], lora.scale) for lora in each]) for each in SETS if each}
    )


def engine(of: ModelFamily, low_ranks: LowRanks) -> Engine:
    reusing = ReuseOptions(correction_bits=EXACT)
    return Engine(of, ROOMY, lambda: 0.0, reusing=reusing, low_ranks=low_ranks)


def finished(made: Engine, *rows: Row) -> dict[str, Row]:
    made.batch.submit(rows)
    done: dict[str, Row] = {}
    while (report := made.step()) is not None:
        assert report.failed == ()
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def rows_of(of: ModelFamily) -> list[Row]:
    """Full, renewing and taking from a template, guided or not, under each set; no two neighbours have the same."""
    taken, rows = template(of, steps=6), []
    for index in range(9):
        guided = 2.0 if index % 2 else 1.0
        spec = Spec(str(index), grid=GRID, steps=6, seed=index, true_cfg_scale=guided, text_tokens=4 + index)
        kind = index // 3
        row = tiny_flux.row(of, spec) if kind == 0 else edit(of, taken if kind == 1 else None, spec)
        row = changed(row, renewed_every=3) if kind == 2 else row
        rows.append(replace(row, adapters=Adapters(SETS[index % 3])))
    return rows


def test_equal_sets_are_neighbours_in_a_step(of: ModelFamily, shelf: LoraSetStore) -> None:
    made = engine(of, shelf)
    made.batch.submit(rows_of(of)[:8])
    order = [row.adapters.loras for row in made.plan()]
    assert order == sorted(order)
    assert len(set(order)) == 3


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["full", "template", "renewing"])
def test_loras_that_join_later_act_from_their_step_on(
    of: ModelFamily, shelf: LoraSetStore, kind: int
) -> None:
    """It is the row without them up to that step, and from there the row that goes on elsewhere under them."""
    plain = rows_of(of)[3 * kind]
    late = replace(plain, adapters=Adapters(SETS[2], loras_from=2))
    made = engine(of, shelf)
    made.batch.submit([plain])
    for _ in range(2):
        report = made.step()
    there = changed(present(report).advanced[0], degree=0, corrections=None, adapters=Adapters(SETS[2]))
    wanted = finished(engine(of, shelf), there)[plain.key.job_id]
    found = finished(engine(of, shelf), late)[plain.key.job_id]
    torch.testing.assert_close(found.latent, wanted.latent, atol=EXACTLY, rtol=0)


def test_the_step_in_which_loras_join_is_in_full(of: ModelFamily, shelf: LoraSetStore) -> None:
    made = engine(of, shelf)
    made.batch.submit(
        [replace(rows_of(of)[index], adapters=Adapters(SETS[1], loras_from=2)) for index in (3, 6)]
    )
    tokens = []
    for _ in range(4):
        report = present(made.step())
        tokens.append(present(report.sample).image_tokens)
    assert tokens[0] == tokens[2] == 3 * 16  # one of them is guided
    assert tokens[1] == 3 * 4


def test_a_row_is_never_computed_without_a_set_that_is_to_act(of: ModelFamily, shelf: LoraSetStore) -> None:
    rows = rows_of(of)[:3]
    made = engine(of, LoraSetStore({SETS[1]: shelf.sets[SETS[1]]}))
    made.batch.submit(rows)
    report = present(made.step())
    assert {row.key for row in report.advanced} == {row.key for row in rows[:2]}
    (failed,) = report.failed
    assert failed.row.key == rows[2].key
    assert isinstance(failed.error, InternalError)
    assert "LoRA" in str(failed.error)


def test_corrections_belong_to_the_set_under_which_they_were_learned(
    of: ModelFamily, shelf: LoraSetStore
) -> None:
    kept = CorrectionCache(1 << 30)
    for index in (3, 4):
        made = engine(of, shelf)
        made.batch.submit([rows_of(of)[index]])
        report = present(made.step())
        (row,) = report.advanced
        assert row.reuse.taught
        if index == 4:
            row = changed(
                row,
                prompts=row.inputs.prompts[:1],
                corrections=row.reuse.corrections and row.reuse.corrections[:1],
            )
        assert kept.claim(row)
        kept.keep(row)
        assert row.region is not None
        assert row.reuse.template is not None
        under = present(row.adapters.learned_under(0))
        assert (
            kept.find(row.reuse.template.id, row.region, 2 if index == 3 else 1, under)
            == row.reuse.corrections
        )
        assert kept.find(row.reuse.template.id, row.region, 1, "another set") is None
    controlled = replace(row, adapters=Adapters(controls=(RowControl("m", "d", 1.0, 0, 4),)))
    assert not kept.claim(controlled)
