"""ControlNets in this process: what they see of a row that has more than a picture, and for how long it serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from giornata.control.link.client import ControlLink
from giornata.control.loading import load
from giornata.control.protocol import ControlNet
from giornata.packed.region import region
from giornata.planning.controls import work_of
from giornata.wire.controlnets import DataPath
from giornata_denoiser.controls.executing import ControlDispatcher
from giornata_denoiser.controls.local import LocalControls, costing
from giornata_denoiser.controls.networks import ControlNetTarget, controlled
from giornata_denoiser.controls.remote import RemoteControlOptions
from giornata_denoiser.engine.controls import OfSequences
from giornata_denoiser.rows.adapters import Adapters, RowControl
from giornata_denoiser.rows.row import Row
from tests.contract.control_link.strangers import TOKEN, listening_at
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import LATENT, Spec
from tests.fakes.tiny_flux_control import net
from tests.unit.denoiser.controls.test_remote import Open

CPU = torch.device("cpu")
FAMILY = tiny_flux.family()
GRID = (3, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ControlNet:
    folder: Path = tmp_path_factory.mktemp("net")
    net(1, 1).save_pretrained(folder)
    return load(folder, torch.float32, CPU)


def network() -> ControlNetTarget:
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


def test_a_step_in_full_takes_nothing_that_an_instance_would_not_have_made_for_it(loaded: ControlNet) -> None:
    """One makes the region's samples alone; here they are of the picture, and serve no longer for that."""
    nets, row = {loaded.card.digest: loaded}, masked(loaded)
    controls = LocalControls(nets, network(), 2)
    before = first(added(controls, row, whole=False))
    again = added(controls, later(row), whole=True)
    fresh = added(LocalControls(nets, network(), 2), later(row), whole=True)
    torch.testing.assert_close(first(again), first(fresh), rtol=0, atol=0)
    held = added(LocalControls(nets, network(), 2), row, whole=True)
    torch.testing.assert_close(first(held), before, rtol=0, atol=0)
    assert (first(fresh) - before).abs().max() > 1e-3, "the comparison sees the step"


def test_a_row_that_is_computed_here_until_it_is_open_elsewhere_costs_what_it_computes(
    loaded: ControlNet, tmp_path: Path
) -> None:
    """Else its steps would be predicted, and the network's costs learned, as if its ControlNets took no time."""
    opened = Open(RemoteControlOptions())
    controls = ControlDispatcher(LocalControls({loaded.card.digest: loaded}, network()), opened.remote)
    row = costing(masked(loaded), {})
    here = controls.able(row)
    assert here is not None
    assert here.adapters.controls[0].work == work_of(loaded.card)
    assert sum(shape.control for shape in here.shapes) > 0
    assert controls.able(here) is here
    with listening_at(tmp_path / "s", None) as served:
        address = served.listener.addresses[DataPath.UNIX]
        with ControlLink(DataPath.UNIX, address, TOKEN, slab_bytes=1 << 16, device=CPU) as link:
            opened.put(link, here)
            there = controls.able(here)
    assert there is not None
    assert sum(shape.control for shape in there.shapes) == 0
    opened.remote.drop(row.key)
    again = controls.able(there)
    assert again is not None
    assert again.adapters == here.adapters
    without = ControlDispatcher(None, opened.remote)
    assert without.able(there) is None
    assert without.able(replace(there, step=5, adapters=Adapters())) is not None
