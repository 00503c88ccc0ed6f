"""ControlNets in this process: what they see of a row that has more than a picture, and for how long it serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from giornata.control.loading import load
from giornata.control.protocol import ControlNet
from giornata.packed.region import beside, region
from giornata_denoiser.controls.local import LocalControls, Reuse
from giornata_denoiser.controls.networks import Controlled, controlled
from giornata_denoiser.engine.controls import OfSequences
from giornata_denoiser.rows.adapters import Adapters, RowControl
from giornata_denoiser.rows.row import Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import LATENT, Spec
from tests.fakes.tiny_flux_control import net

CPU = torch.device("cpu")
FAMILY = tiny_flux.family()
GRID = (3, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ControlNet:
    folder: Path = tmp_path_factory.mktemp("net")
    net(1, 1).save_pretrained(folder)
    return load(folder, torch.float32, CPU)


def network() -> Controlled:
    found = controlled(FAMILY.network, 16)
    assert found is not None
    return found


def masked(of: ControlNet) -> Row:
    cells = torch.zeros(GRID, dtype=torch.bool)
    cells[1, 1:3] = True
    hint = torch.randn(12, LATENT, generator=torch.Generator().manual_seed(3))
    return replace(
        tiny_flux.row(FAMILY, Spec(grid=GRID, steps=6)),
        region=region(cells),
        adapters=Adapters(controls=(RowControl("edges", of.card.digest, 1.0, 0, 6),)),
        control_images=(hint,),
    )


def later(row: Row) -> Row:
    return replace(row, step=row.step + 1, latent=row.latent * 0.5)


def added(controls: LocalControls, row: Row, *, whole: bool) -> OfSequences:
    (of,) = controls.compute([row], [whole])
    return of


def first(of: OfSequences) -> Tensor:
    sample = of[0].sample(0)
    assert sample is not None
    return sample


@pytest.mark.parametrize("companions", [1, 7])
def test_a_part_is_of_the_picture_whatever_lies_behind_it(loaded: ControlNet, companions: int) -> None:
    """References are tokens of the row that a ControlNet does not see."""
    plain = masked(loaded)
    assert plain.region is not None
    row = replace(plain, region=beside(plain.region, companions), companions=companions)
    nets = {loaded.card.digest: loaded}
    one, other = (LocalControls(nets, network(), Reuse(1, 4)) for _ in range(2))
    for whole in (True, False, False):
        mine, expected = added(one, row, whole=whole), added(other, plain, whole=whole)
        assert mine[0].whole == expected[0].whole
        torch.testing.assert_close(first(mine), first(expected), rtol=0, atol=0)
        row, plain = later(row), later(plain)


def test_a_step_in_full_takes_nothing_that_an_instance_would_not_have_made_for_it(loaded: ControlNet) -> None:
    """One makes the region's samples alone; here they are of the picture, and serve no longer for that."""
    nets, row = {loaded.card.digest: loaded}, masked(loaded)
    controls = LocalControls(nets, network(), Reuse(2))
    before = first(added(controls, row, whole=False))
    again = added(controls, later(row), whole=True)
    fresh = added(LocalControls(nets, network(), Reuse(2)), later(row), whole=True)
    torch.testing.assert_close(first(again), first(fresh), rtol=0, atol=0)
    held = added(LocalControls(nets, network(), Reuse(2)), row, whole=True)
    torch.testing.assert_close(first(held), before, rtol=0, atol=0)
    assert (first(fresh) - before).abs().max() > 1e-3, "the comparison sees the step"
