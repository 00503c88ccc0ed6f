"""What steps of every family cost a GPU's host, on a device that is not there: launches, waits, and no race.

A step gives the device its work and waits for nothing: what waits in between leaves it idle. Launches are few; what
adds some makes a number below larger, where it is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from torch import nn

from giornata.packed.region import beside, region
from giornata.scheduling.batch import Capacity
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import Loader, device_for
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.flux.checkpoints import FluxInpaint
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.sampling.flow_matching import FlowMatching, shifted_always, shifted_by_size
from giornata_denoiser.families.unet.checkpoints import network_of
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from tests.fakes import tiny_driven, tiny_flux, tiny_unet
from tests.fakes.cuda import CUDA, Finding, World, pretended
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.test_rehearsal import CARD
from tests.unit.denoiser.families import test_unet_engine as unets

GRID: Final = (4, 4)
KV: Final = frozenset({CacheForm.KV})


@dataclass
class Cost:
    """Of the most expensive step of a kind."""

    launches: int = 0
    waits: Counter[Finding] | None = None


@torch.inference_mode()
def family(name: str) -> ModelFamily:
    if name == "flux":
        return tiny_flux.family(FluxInpaint(nn.Module.to(tiny_flux.transformer(), CUDA, torch.bfloat16)))
    if name == "unet":
        network = network_of(tiny_unet.unet("xl").to(CUDA, torch.bfloat16))
        return ModelFamily(network.text, FlowMatching(tiny_flux.SCHEDULER, shifted_by_size), network)
    model: Any = nn.Module.to(tiny_driven.transformer(name), CUDA, torch.bfloat16)
    driven = tiny_driven.FAMILIES[name].network(model)
    return ModelFamily(driven.text, FlowMatching(tiny_flux.SCHEDULER, shifted_always), driven)


def row(name: str, of: ModelFamily, spec: Spec, *, masked: bool) -> Row:
    if name == "unet":
        made: Row = unets.row(of, spec.job_id, steps=spec.steps, seed=spec.seed)
        return replace(made, region=unets.WHERE) if masked else made
    made = (tiny_flux if name == "flux" else tiny_driven).row(of, replace(spec, grid=GRID))
    if not masked:
        return made
    touched = torch.zeros(GRID, dtype=torch.bool)
    touched.view(-1)[[5, 6, 9, 10][spec.seed % 2 :]] = True
    where = region(touched)
    assert where is not None
    return replace(made, region=beside(where, made.companions))


def template(name: str, of: ModelFamily) -> CachedTemplate:
    engine = Engine(
        of, Capacity(8, 100_000), lambda: 0.0, reusing=ReuseOptions(device=device_for(CUDA, 1 << 30))
    )
    run = row(name, of, Spec("run", steps=3, seed=9), masked=False)
    engine.batch.submit([replace(run, records=RecordingSpec(KV, 8))])
    while (report := engine.step()) is not None:
        assert not report.failed, report.failed[0].error.__cause__
        done = report.advanced
    return CachedTemplate("t", GRID, done[0].entries).pinned()


def costs_of(name: str, of: ModelFamily, world: World) -> dict[str, Cost]:
    """By kind of step: an edit that joins and learns, masked ones, and those of several rows, one of them in full."""
    taken = template(name, of)
    found = {kind: Cost() for kind in ("joins", "masked", "several")}
    with Loader() as loader:
        engine = Engine(
            of,
            Capacity(8, 100_000),
            lambda: 0.0,
            reusing=ReuseOptions(device=device_for(CUDA, 1 << 30), loader=loader, correction_bits=8),
        )
        first = row(name, of, Spec("a", steps=7, seed=0), masked=True)
        engine.batch.submit([replace(first, template=taken)])
        for number in range(7):
            if number == 3:
                other = row(name, of, Spec("b", steps=4, seed=1, text_tokens=6), masked=True)
                engine.batch.submit([replace(other, template=taken)])
            if number == 5:
                shown = row(name, of, Spec("c", steps=2, seed=2), masked=False)
                engine.batch.submit([replace(shown, partial_images=1)])
            world.launches.clear()
            world.synchronisations.clear()
            report = engine.step()
            assert report is not None
            assert not report.failed, report.failed[0].error.__cause__
            kind = "joins" if number == 0 else "masked" if number < 3 else "several"
            cost = found[kind]
            cost.launches = max(cost.launches, sum(world.launches.values()))
            cost.waits = (cost.waits or Counter()) + Counter(world.synchronisations)
    return found


def waits_of(cost: Cost) -> Counter[Finding]:
    """Without those in modules of diffusers, of rows that join."""
    told = cost.waits or Counter()
    own = (each for each in told if not each.where.startswith("diffusers/"))
    return Counter({each: told[each] for each in own})


LAUNCHES: Final = {
    "flux": (336, 105, 426),
    "sd3": (624, 434, 709),
    "chroma": (539, 321, 636),
    "qwen-image": (639, 413, 689),
    "qwen-image-edit": (649, 413, 701),
    "qwen-image-edit-plus": (691, 412, 741),
    "qwen-image-2.1": (725, 270, 812),
    "flux2": (558, 316, 678),
    "flux2-klein-kv": (920, 326, 1042),
    "flux2-klein": (539, 316, 659),
    "z-image": (681, 386, 736),
    "unet": (2151, 2150, 4269),
}
"""Of one step: an edit that joins and learns, a masked one, and several rows."""
ROOM: Final = 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_waits_for_nothing_races_with_nothing_and_launches_what_it_did(name: str) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    with pretended() as world:
        of = family(name)
        rehearse(Checkpoint(CARD, of, None))
        rehearsed = set(world.variants)
        world.clear()
        costs = costs_of(name, of, world)
        assert Counter(world.races) == {}
    assert world.variants - rehearsed == set(), "an edit waits seconds for what Triton compiles in its step"
    assert {kind: told for kind, cost in costs.items() if (told := waits_of(cost))} == {}
    launches = tuple(cost.launches for cost in costs.values())
    assert all(own <= ROOM * most for own, most in zip(launches, LAUNCHES[name], strict=True)), launches
