"""ControlNets of UNets where rows compute the tiles of their region alone: what they add joins the right tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from torch import Tensor

from giornata.control.networks import ControlNet, load
from giornata.packed.packing import BlockInputs, CachedTokens, maps_to_tiles, tiles_to_maps
from giornata.scheduling.batch import Capacity
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT
from giornata_denoiser.controls.controlnets import ControlDispatcher
from giornata_denoiser.controls.residuals import LocalControls
from giornata_denoiser.controls.residuals import control_target as controlled_network
from giornata_denoiser.engine.batch_tensors import with_residuals
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.parts import Adapters, RowControl
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens
from tests.fakes import tiny_unet_control
from tests.present import present
from tests.unit.denoiser.engine.edits import finished
from tests.unit.denoiser.engine.test_masked import GivenResiduals, on_the_line, step, uses_of
from tests.unit.denoiser.families.test_unet_engine import WHERE, family, row

CLOSE = 1e-6
"""In float64; ControlNets and networks are told times of float32."""
SIDE, PIXELS = 4, 16
"""Latent pixels a side of a tile, and the picture's."""
SCALE = 0.8


@dataclass(frozen=True)
class Both:
    """A ControlNet as diffusers has it, and as it is loaded."""

    oracle: ControlNetModel
    loaded: ControlNet

    def added(self, at: Row) -> list[GivenResiduals]:
        """By sequence of a row: what it adds in the row's next step to all tiles, by diffusers' own forward."""
        found = []
        for prompt in at.inputs.prompts:
            of: Any = prompt
            image = present(at.adapters.controls[0].image)
            skips, middle = self.oracle(
                tiles_to_maps(at.scaled(at.latent).view(1, -1, 4, SIDE, SIDE), at.grid),
                at.track.times[at.step],
                of.embeds[None],
                controlnet_cond=image[None],
                conditioning_scale=SCALE,
                added_cond_kwargs={
                    "text_embeds": of.pooled[None],
                    "time_ids": of.tensors["add_time_ids"][None],
                },
                return_dict=False,
            )
            found.append(
                GivenResiduals([maps_to_tiles(one, at.grid)[0].flatten(1) for one in (*skips, middle)])
            )
        return found

    def local(self, of: ModelFamily, held_steps: int = 2) -> LocalControls:
        network = present(controlled_network(of.network, PIXELS))
        return LocalControls({self.loaded.card.digest: self.loaded}, network, held_steps)

    def computed(self, of: ModelFamily, rows: Sequence[Row], held_steps: int) -> dict[str, Row]:
        """The rows' ends, by an engine."""
        engine = Engine(
            of,
            Capacity(rows=8, tokens=10_000),
            lambda: 0.0,
            reusing=ReuseOptions(correction_bits=EXACT),
            controls=ControlDispatcher(self.local(of, held_steps), None),
        )
        engine.batch.submit(rows)
        return finished(engine)

    def under(self, at: Row, *, first: int = 0, end: int = 100) -> Row:
        """`at` with the ControlNet, which acts from step `first` on and before `end`."""
        generator = torch.Generator().manual_seed(at.key.index + 4)
        height, width = (PIXELS * side for side in at.grid)
        image = torch.rand(3, height, width, generator=generator).double()
        use = RowControl("edges", self.loaded.card.digest, SCALE, first, end, image=image)
        return replace(at, adapters=Adapters(controls=(use,)))


@pytest.fixture
def both(tmp_path: Path) -> Both:
    made = tiny_unet_control.net("shallow", dtype=torch.float64)
    made.save_pretrained(tmp_path / "edges")
    return Both(made, load(tmp_path / "edges", torch.float64, torch.device("cpu")))


def plus(uses: Iterable[BlockInputs], added: Sequence[GivenResiduals]) -> list[BlockInputs]:
    return [replace(use, residuals=each) for use, each in zip(uses, added, strict=True)]


@torch.inference_mode()
def test_masked_equals_full_on_the_compute_set(both: Both) -> None:
    """Rows with and without share the step; what lies outside is that of the row's own step in full."""
    of = family()
    controls = both.local(of)
    rows = [
        both.under(on_the_line(row(of, "guided", scale=2.0, seed=1))),
        on_the_line(row(of, "plain", seed=2)),
        both.under(on_the_line(row(of, "one", seed=3))),
    ]
    whole: list[Tensor] = []
    recorders: list[list[Everything]] = []
    for each in rows:
        seen = [Everything() for _ in each.inputs.prompts]
        uses = [BlockInputs(recorder=recorder) for recorder in seen]
        whole += step(of, [each], plus(uses, both.added(each)) if each.adapters.controls else uses)
        recorders.append(seen)
    plain = step(of, rows[:1], [BlockInputs(), BlockInputs()])[0]
    assert (whole[0] - plain).abs().max() > 1000 * CLOSE, "the ControlNet is seen"

    masked = [replace(each, region=WHERE) for each in rows]
    modes = (BlockMode.KV,) * of.depth
    taking = {
        index: [BlockInputs(CachedTokens(modes, RecordedUnetTokens(kept, WHERE))) for kept in seen]
        for index, seen in enumerate(recorders)
    }
    taken = with_residuals(uses_of(masked, taking), masked, controls.compute(masked, [False] * len(masked)))
    for latent, wanted in zip(step(of, masked, taken), whole, strict=True):
        torch.testing.assert_close(latent[WHERE.computed], wanted[WHERE.computed], atol=CLOSE, rtol=0)
    swapped = [
        use if use.residuals is None else replace(use, residuals=_shifted(use.residuals)) for use in taken
    ]
    assert (step(of, masked, swapped)[0] - whole[0])[WHERE.computed].abs().max() > 1000 * CLOSE, "tiles count"


def _shifted(added: Any) -> GivenResiduals:
    return GivenResiduals([added.sample(block).roll(1, 0) for block in range(5)])


@pytest.mark.parametrize(("held_steps", "computed_in"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 3])])
@torch.inference_mode()
def test_samples_are_held_where_a_row_takes_what_lies_outside(
    both: Both, held_steps: int, computed_in: list[int]
) -> None:
    """It takes what each third step in full made; what the ControlNet added serves some steps more.

    A step in full takes nothing that a step of the region has asked for: an instance made no more of it.
    """
    of = family()
    renewing = changed(
        both.under(row(of, "held", steps=6, seed=1, scale=2.0), end=5), region=WHERE, renewed_every=3
    )
    wanted, seen, added = renewing, list[Everything](), list[GivenResiduals]()
    while not wanted.done:
        if wanted.step in computed_in:
            added = both.added(wanted)
        if wanted.step % 3 == 0:
            seen = [Everything() for _ in wanted.inputs.prompts]
            uses = [BlockInputs(recorder=each) for each in seen]
        else:
            modes = (BlockMode.KV,) * of.depth
            uses = [BlockInputs(CachedTokens(modes, RecordedUnetTokens(each, WHERE))) for each in seen]
        wanted = wanted.advanced(step(of, [wanted], plus(uses, added) if wanted.step < 5 else uses)[0])
    forwards: list[int] = []
    net: Any = both.loaded
    net.net.register_forward_hook(lambda _, args, __: forwards.append(len(args[0])))
    found = both.computed(of, [renewing], held_steps)["held"]
    assert forwards == [1] * 2 * len(computed_in), "of each sequence: their texts differ in length"
    torch.testing.assert_close(found.latent, wanted.latent, atol=CLOSE, rtol=0)


@torch.inference_mode()
def test_a_row_that_computes_everything_holds_nothing(both: Both) -> None:
    """A row beside it does; its ControlNet begins in its second step."""
    of = family()
    whole = both.under(row(of, "whole", steps=3, seed=1))
    late = both.under(row(of, "late", steps=4, seed=2), first=1)
    late = changed(late, region=WHERE, renewed_every=4)
    wanted = whole
    while not wanted.done:
        wanted = wanted.advanced(step(of, [wanted], plus([BlockInputs()], both.added(wanted)))[0])
    forwards: list[int] = []
    net: Any = both.loaded
    net.net.register_forward_hook(lambda _, args, __: forwards.append(len(args[0])))
    found = both.computed(of, [whole, late], held_steps=2)
    torch.testing.assert_close(found["whole"].latent, wanted.latent, atol=CLOSE, rtol=0)
    assert forwards == [1, 2, 1, 1], "of the whole picture 0, 1, 2; of the other 1 and 3"
