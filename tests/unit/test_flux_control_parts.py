"""ControlNets of Flux that compute a part of a picture: equal to all of it where the rest is the same run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from giornata.control.expansion import summed
from giornata.control.flux import FluxControl
from giornata.control.loading import load
from giornata.control.protocol import Conditions, ControlText
from giornata.control.running import Act, RowStep, run
from giornata.packed.region import Region, region
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from tests.fakes.tiny_flux import JOINT_DIM, LATENT, POOLED_DIM
from tests.fakes.tiny_flux_control import net

EXACT = 1e-9
BASE = ControlBase(
    kind=ControlKind.FLUX,
    channels=(64,) * 6,
    singles=3,
    latent_channels=LATENT,
    token_pixels=16,
    text_channels=JOINT_DIM,
    pooled_channels=POOLED_DIM,
)
GRID = (4, 5)


def loaded(folder: Path, seed: int, *shape: int) -> FluxControl:
    net(*shape, seed=seed).double().save_pretrained(folder)
    found = load(folder, torch.float64, torch.device("cpu"))
    assert isinstance(found, FluxControl)
    return found


def masked() -> Region:
    cells = torch.zeros(GRID, dtype=torch.bool)
    cells[1:3, 2:4] = True
    found = region(cells)
    assert found is not None
    return found


def acting(one: FluxControl, scale: float, of: Region | None) -> Act:
    """A row's ControlNet, opened; it keeps what lies outside of a region."""
    tokens, text = (
        GRID[0] * GRID[1],
        ControlText(torch.randn(6, JOINT_DIM).double(), torch.randn(POOLED_DIM).double()),
    )
    opened = one.open(
        Conditions(torch.randn(tokens, LATENT).double(), GRID, (text,), torch.tensor([900.0, 500.0, 100.0]))
    )
    kept = () if of is None else (one.keeping(opened, 0, of),)
    return Act(one, opened, scale, one.behind(BASE), kept)


def samples(*rows: RowStep) -> list[dict[int, Tensor]]:
    found: list[dict[int, Tensor]] = [{} for _ in rows]
    for row, nth, sample in run(rows):
        found[row][nth] = sample
    return found


def test_a_part_equals_the_whole_where_the_rest_is_the_same_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    of = masked()
    nets = loaded(tmp_path / "a", 1, 2, 1), loaded(tmp_path / "b", 2, 1, 2)
    acts = [acting(one, scale, of) for one, scale in zip(nets, (0.7, 0.4), strict=True)]
    other = RowStep([acting(nets[0], 1.0, None)], 1, torch.randn(20, LATENT).double())
    latents = torch.randn(20, LATENT).double()
    whole, _ = samples(RowStep(acts, 1, latents, region=of, renews=True), other)
    part, beside = samples(RowStep(acts, 1, latents, region=of, renews=False, whole=False), other)
    assert len(whole) == len(summed([act.behind for act in acts]).parts) > 1
    for nth, sample in whole.items():
        torch.testing.assert_close(part[nth], sample[:, of.computed], atol=EXACT, rtol=0)
    (alone,) = samples(other)
    for nth, sample in alone.items():
        torch.testing.assert_close(beside[nth], sample, atol=EXACT, rtol=0)


def test_a_part_sees_what_was_kept_of_the_rest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    of = masked()
    one = loaded(tmp_path / "a", 1, 2, 1)
    act = acting(one, 1.0, of)
    before, now = torch.randn(20, LATENT).double(), torch.randn(20, LATENT).double()
    samples(RowStep([act], 0, before, region=of, renews=True))
    (part,) = samples(RowStep([act], 1, now, region=of, renews=False, whole=False))
    mixed = before.clone()
    mixed[of.computed] = now[of.computed]
    (full,) = samples(RowStep([acting_as(act)], 1, now))
    difference = max(float((part[nth] - full[nth][:, of.computed]).abs().max()) for nth in full)
    assert difference > 1e-3, "the rest is an earlier step's"
    samples(RowStep([act], 1, now, region=of, renews=True))
    (renewed,) = samples(RowStep([act], 1, now, region=of, renews=False, whole=False))
    for nth, sample in full.items():
        torch.testing.assert_close(renewed[nth], sample[:, of.computed], atol=EXACT, rtol=0)


def acting_as(act: Act) -> Act:
    """The same, which keeps nothing."""
    return Act(act.net, act.opened, act.scale, act.behind)


def test_nothing_is_taken_before_it_is_kept(tmp_path: Path) -> None:
    of = masked()
    act = acting(loaded(tmp_path / "a", 1, 1, 1), 1.0, of)
    with pytest.raises(LookupError):
        samples(RowStep([act], 0, torch.randn(20, LATENT).double(), region=of, renews=False, whole=False))
