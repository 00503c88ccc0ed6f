"""Edits without a template: between two steps in full they take their own keys and values of the outside tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.planning.operations import StepCosts
from giornata.wire.values import BlockMode
from giornata_denoiser.attempts.inputs import TemplateReuse, with_reuse
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine import step_budget
from giornata_denoiser.engine.step_budget import renew_steps, row_bytes
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, edit, engine, finish_rows, template, where
from tests.unit.denoiser.engine.test_masked import (
    BLOCKS,
    FLOAT32,
    OF,
    exact_family,
    recorded,
    reusing,
    step,
)

KV = (BlockMode.KV,) * BLOCKS


def renewing(of: ModelFamily, spec: Spec, every: int) -> Row:
    return changed(edit(of, None, spec), renewed_every=every)


def expected(of: ModelFamily, row: Row, every: int) -> Tensor:
    """By a second implementation: each step in full shows what the steps until the next one take."""
    seen: list[Any] = []
    first = row.step
    while not row.done:
        if row.step == first or row.step % every == 0:
            latent, seen = recorded(of, row)
        else:
            (latent,) = step(of, [row], reusing(row, seen, KV, room=False))
        row = row.advanced(latent)
    return row.latent


def resumed(of: ModelFamily, spec: Spec, at_step: int) -> Row:
    """A row that another worker has begun."""
    row = tiny_flux.row(of, spec)
    while row.step < at_step:
        row = row.advanced(step(of, [row])[0])
    return changed(tiny_flux.row(of, spec, row.export()), region=where(), renewed_every=3)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "scale", "fill"), [(1, 2.0, False), (3, 2.0, True), (10, 1.0, False)])
def test_steps_take_what_the_last_one_in_full_made(every: int, scale: float, fill: bool) -> None:
    """Beside a row that takes from a template, and one that computes everything."""
    of = exact_family(fill=fill)
    specs = [Spec(f"e{i}", grid=GRID, steps=7 - i, true_cfg_scale=scale, seed=i) for i in range(3)]
    row = renewing(of, specs[0], every)
    others = [edit(of, template(of), specs[1]), tiny_flux.row(of, specs[2])]
    ended = finish_rows(of, [row, *others], correction_bits=EXACT)
    torch.testing.assert_close(ended["e0"].latent, expected(of, row, every), atol=FLOAT32, rtol=0)
    for other in others:
        wanted = finish_rows(of, [other], correction_bits=EXACT)[other.key.job_id].latent
        torch.testing.assert_close(ended[other.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_row_that_goes_on_here_begins_in_full() -> None:
    row = resumed(OF, Spec(grid=GRID, steps=7), 4)
    torch.testing.assert_close(
        finish_rows(OF, [row])["job"].latent, expected(OF, row, 3), atol=FLOAT32, rtol=0
    )


@pytest.mark.parametrize("forgets", [False, True])
def test_the_samples_tell_what_is_computed(forgets: bool) -> None:
    """A row whose own keys and values have been given back computes its next step in full."""
    row = renewing(OF, Spec(grid=GRID, steps=8), 3)
    made = engine(OF)
    made.batch.submit([row])
    tokens = []
    for number in range(8):
        if forgets and number == 5:
            made.rest()
        (now,) = made.plan()
        planned = now.tokens - now.text_tokens
        report = made.settle(made.computing.compute((now,)))
        tokens.append(present(report.sample).image_tokens)
        assert planned == tokens[-1] or (forgets and number == 5)
    assert tokens == [16, 4, 4, 16, 4, 16 if forgets else 4, 16, 4]


class Hiccup(FluxInpaint):
    """A network one forward of which fails after its last block."""

    forwards = 0

    def __init__(self, fails: int, dtype: torch.dtype = torch.float32) -> None:
        transformer = tiny_flux.transformer()
        torch.nn.Module.to(transformer, dtype)
        super().__init__(transformer)
        self._fails = fails

    def predict(self, *args: Any, **named: Any) -> Tensor:
        found = super().predict(*args, **named)
        self.forwards += 1
        if self.forwards == self._fails:
            raise RuntimeError("once")
        return found


@pytest.mark.parametrize("fails", [1, 4])
def test_a_step_that_failed_is_computed_again(fails: int) -> None:
    """In a batch each row is tried alone, as it was: neither loses what it keeps."""
    rows = [renewing(OF, Spec(name, grid=GRID, steps=6, seed=i), 3) for i, name in enumerate("ab")]
    ended = finish_rows(tiny_flux.family(Hiccup(fails)), rows)
    for row in rows:
        wanted = expected(OF, row, 3)
        torch.testing.assert_close(ended[row.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.slow
def test_a_row_that_fails_alone_goes_on_in_full() -> None:
    row = renewing(OF, Spec(grid=GRID, steps=5), 3)
    ended = finish_rows(tiny_flux.family(Hiccup(2)), [row])["job"]
    wanted = row
    while not wanted.done:
        wanted = wanted.advanced(step(OF, [wanted])[0])
    torch.testing.assert_close(ended.latent, wanted.latent, atol=FLOAT32, rtol=0)
    assert not ended.reuse.renewed_every


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_what_it_keeps_is_weighed(scale: float) -> None:
    row = renewing(OF, Spec(grid=GRID, true_cfg_scale=scale), 3)
    outside, width = 12, 64
    kept = sum(2 * BLOCKS * width * 4 * (own + outside) for own in row.own_tokens)
    assert row_bytes(row, OF, None) - row_bytes(changed(row, renewed_every=0), OF, None) == kept


def test_a_miss_renews_where_that_gains_something() -> None:
    """Not with `strict`, where nothing lies outside, in a single step, or where masks save nothing."""
    costs = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    long, row, one = (tiny_flux.row(OF, Spec(grid=GRID, steps=steps)) for steps in (30, 4, 1))
    auto = TemplateReuse(1.0, None, costs, 7)
    assert with_reuse(long, where(), auto, OF).reuse.renewed_every == 7
    found = with_reuse(row, where(), auto, OF)
    assert (found.reuse.renewed_every, found.reuse.template, found.reuse.skipped) == (2, None, False)
    assert found.region is not None
    assert found.region.digest == where().digest
    for built, place, how in (
        (row, where(), replace(auto, renew_steps=0)),
        (row, None, auto),
        (one, where(), auto),
        (row, where(), replace(auto, costs=StepCosts((1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))),
    ):
        found = with_reuse(built, place, how, OF)
        assert (found.reuse.renewed_every, found.region, found.reuse.skipped) == (0, None, False)


def test_a_template_whose_loads_are_too_slow_is_left_for_ones_own() -> None:
    slow = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0), (1e12, 1.0))
    row = tiny_flux.row(OF, Spec(grid=GRID, steps=4))
    found = with_reuse(row, where(), TemplateReuse(1.0, template(OF), slow, 7), OF)
    assert (found.reuse.renewed_every, found.reuse.template, found.reuse.skipped) == (2, None, True)


@pytest.mark.parametrize(("fill", "steps"), [(True, [0, 2, 7]), (False, [0, 2, 3])])
def test_a_network_that_sees_no_mask_renews_more_often(fill: bool, steps: list[int]) -> None:
    of = tiny_flux.family(fill=fill)
    assert [renew_steps(configured, of) for configured in (0, 2, 7)] == steps


@pytest.mark.parametrize("fill", [True, False])
def test_a_unet_without_a_recording_computes_every_step_in_full(fill: bool) -> None:
    network = tiny_unet.network("sd", fill=fill)
    of = ModelFamily(network.text, OF.schedule, network)
    assert [renew_steps(configured, of) for configured in (0, 2, 7)] == [0, 0, 0]


def test_what_is_kept_in_bits_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = renewing(OF, Spec(grid=GRID), 3)
    plain = changed(row, renewed_every=0)
    slabs = row_bytes(row, OF, 4) - row_bytes(plain, OF, 4)
    monkeypatch.setattr(step_budget, "keeps_slabs", lambda _: False)
    stored = row_bytes(row, OF, 4) - row_bytes(plain, OF, 4)
    outside, own, width = 12, row.own_tokens[0], 64
    parts = 2 * BLOCKS * (outside * width // 2 + 2 * width * 4)
    assert stored == parts + 2 * width * 4 * (own + outside)
    assert stored < slabs
