"""Steps on a device that is not there: launches, waits and races, adapters, their rehearsal, and their memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from giornata.control.flux import FluxControl
from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.packed.packing import BlockInputs, CachedTokens, make_region, to_device, with_companions
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.adapters import ControlKind
from giornata.wire.errors import Failed
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls import residuals
from giornata_denoiser.controls.residuals import AddedResiduals, control_target
from giornata_denoiser.engine.batch_tensors import ControlPart, OfSequences, assemble, place_inputs
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import Loader, device_for
from giornata_denoiser.engine.slabs import Slabs, WaitTimer
from giornata_denoiser.engine.step_budget import StepBudget, step_bytes
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.sampling import FlowMatching, shifted_always, shifted_by_size
from giornata_denoiser.families.unet.network import network_of
from giornata_denoiser.loras import LoraTiers
from giornata_denoiser.profiling.fitting import activation_bytes
from giornata_denoiser.profiling.measuring import RandomLoras, StepMeter
from giornata_denoiser.profiling.mixtures import RowSize, StepShape
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, StoredTensor, bits_of
from giornata_denoiser.startup import memory_on, practice_row, rehearse
from giornata_lab.bench.compute import models, tiny_flux, tiny_unet
from giornata_lab.bench.compute.models import REAL, flux
from giornata_lab.bench.compute.rows import Rows, changed
from giornata_lab.bench.compute.tiny_flux import Spec
from giornata_lab.bench.compute.workload import WorkloadEdit
from tests.fakes import tiny_driven, tiny_flux_control
from tests.fakes.cuda import CUDA, Finding, World, pretended
from tests.fakes.fleet import CARD
from tests.fakes.local_controls import controls_of
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.families import test_unet_engine as unets
from tests.unit.denoiser.test_loras import ROOMY, Remote, factors

# What steps of every family cost a GPU's host, on a device that is not there: launches, waits, and no race.


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
        network = network_of(tiny_unet.unet("shallow").to(CUDA, torch.bfloat16))
        return ModelFamily(network.text, FlowMatching(tiny_flux.SCHEDULER, shifted_by_size), network)
    model: Any = nn.Module.to(tiny_driven.transformer(name), CUDA, torch.bfloat16)
    for blocks in {"transformer_blocks", "layers"} & dict(model.named_children()).keys():
        setattr(model, blocks, getattr(model, blocks)[-3 if name == "sd3" else -2 :])  # one more of its kinds
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
    where = present(make_region(touched))
    return replace(made, region=with_companions(where, made.inputs.companions))


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
        engine.batch.submit([changed(first, template=taken)])
        for number in range(4):
            if number == 2:
                other = row(name, of, Spec("b", steps=4, seed=1, text_tokens=6), masked=True)
                engine.batch.submit([changed(other, template=taken)])
            if number == 3:
                shown = row(name, of, Spec("c", steps=2, seed=2), masked=False)
                engine.batch.submit([changed(shown, partial_images=1)])
            world.launches.clear()
            world.synchronisations.clear()
            report = present(engine.step())
            assert not report.failed, report.failed[0].error.__cause__
            kind = "joins" if number == 0 else "masked" if number < 2 else "several"
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
    "sd3": (478, 312, 545),
    "chroma": (539, 321, 636),
    "qwen-image": (371, 225, 415),
    "qwen-image-edit": (375, 225, 419),
    "qwen-image-edit-plus": (407, 226, 451),
    "qwen-image-2.1": (425, 152, 490),
    "flux2": (558, 316, 678),
    "flux2-klein-kv": (920, 326, 1042),
    "flux2-klein": (539, 316, 659),
    "z-image": (553, 300, 607),
    "unet": (1304, 1376, 2661),
}
"""Of one step: an edit that joins and learns, a masked one, and several rows."""
ROOM: Final = 1.05
ALIKE: Final = ("flux2", "flux2-klein", "qwen-image-edit")
"""Families whose blocks are those of another one here."""
ADAPTED: Final = ("flux", "sd3", "unet")
"""Families that make a guided edit with adapters, too: one of each kind of network."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else []) for name in LAUNCHES]
)
def test_a_step_waits_for_nothing_races_with_nothing_and_launches_what_it_did(name: str) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    with pretended() as world:
        checkpoint = Checkpoint(GUIDED if name in ADAPTED else CARD, family(name), None)
        rehearse(checkpoint)
        compiled, known = set(world.variants), launched(world)
        world.clear()
        costs = costs_of(name, checkpoint.family, world)
        assert Counter(world.races) == {}
        if name in ADAPTED:
            world.clear()
            make_guided_edit(checkpoint)
            assert launched(world) - known == set(), "a guided edit with a LoRA and a ControlNet"
    assert world.variants - compiled == set(), "an edit waits seconds for what Triton compiles in its step"
    assert {kind: told for kind, cost in costs.items() if (told := waits_of(cost))} == {}
    launches = tuple(cost.launches for cost in costs.values())
    assert all(own <= ROOM * most for own, most in zip(launches, LAUNCHES[name], strict=True)), launches


# The rehearsal on a device that is not there: what it leaves to edits, and what it says of too little
# memory.


GUIDED = CARD.model_copy(update={"takes_true_cfg": True})
LARGER = (8, 8)


class Acting(ControlPart):
    """A LoRA of every linear layer, and what a ControlNet adds behind every block; both are on the device already."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        of, self.loras = checkpoint.family, RandomLoras(checkpoint.family.network.layers)
        network = control_target(of.network, checkpoint.card.pixel_multiple)
        channels = () if network is None else network.base.channels
        sums = tuple(torch.zeros(1, 64, each, dtype=of.dtype, device=CUDA) for each in channels)
        self.added = tuple(AddedResiduals(n, tuple(range(len(sums))), sums.__getitem__) for n in range(2))
        self.find(())
        net = RowControl("n", "n", 1.0, 0, 2)
        self.adapters = Adapters((RowLora("a"),), controls=(net,) if channels else ())

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self.loras.set_of(1)

    def residuals(
        self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer
    ) -> tuple[OfSequences, ...]:
        return tuple(self.added[: len(row.inputs.prompts)] if row.adapters.controls else () for row in rows)


def launched(world: World) -> set[str]:
    return {name for name, count in world.launches.items() if count}


def make_guided_edit(checkpoint: Checkpoint) -> None:
    """A guided edit with a LoRA and a ControlNet."""
    acting = Acting(checkpoint)
    key = RowKey("edit", 0, 0)
    row = practice_row(checkpoint, key, LARGER, GUIDED.max_text_tokens, torch.zeros, guided=True)
    how = ReuseOptions(device=device_for(CUDA, 0))
    engine = Engine(
        checkpoint.family, Capacity(8, 10_000), lambda: 0.0, reusing=how, low_ranks=acting, controls=acting
    )
    engine.batch.submit([replace(row, adapters=acting.adapters)])
    while (report := engine.step()) is not None:
        assert not report.failed, report.failed[0].error.__cause__


def test_a_network_is_rehearsed_without_hooks_of_loras_that_stay() -> None:
    """What no LoRA changes is called as it is: hooks would cost each layer of each step some of the host's time."""
    with pretended(triton=False):
        checkpoint = Checkpoint(CARD, family("flux"), None)
        rehearse(checkpoint)
        layers: Any = checkpoint.family.network.layers
        assert not any(layer._forward_hooks for layer in layers.values())


def test_a_step_that_does_not_fit_is_told_by_the_memory_and_not_by_a_dtype() -> None:
    with pretended(triton=False) as world:
        checkpoint = Checkpoint(CARD, family("flux"), None)
        free = 16 << 10
        world.limit_bytes = world.live_bytes + free
        with pytest.raises(Failed, match="memory holds tiny and no step;") as refused:
            rehearse(checkpoint)
        assert "dtype" not in str(refused.value)
        assert isinstance(refused.value.__cause__, torch.OutOfMemoryError)


def test_what_the_allocator_keeps_of_the_rehearsal_is_given_to_rows() -> None:
    config = DenoiserConfig(model="m", device="cuda")
    with pretended(triton=False) as world:
        checkpoint = Checkpoint(CARD, family("flux"), None)
        before = memory_on(config, checkpoint)
        passing = nn.Module.to(nn.Linear(1 << 10, 1 << 15), CUDA)
        del passing
        assert world.reserved_bytes > world.live_bytes
        assert memory_on(config, checkpoint) == before


# LoRAs and ControlNets on a device that is not there: no race of streams, and no step that waits.


def test_a_set_that_is_let_go_while_a_step_reads_it_stays_until_the_step_has_ended(tmp_path: Path) -> None:
    remote = Remote()
    both = remote.add(factors(1)), remote.add(factors(2), scale=0.5)
    with pretended(triton=False) as world:
        layers = {"layer": nn.Module.to(nn.Linear(6, 4), CUDA, torch.bfloat16)}
        tiers: Any = LoraTiers(remote.fetch, low_rank, layers, tmp_path, ROOMY)
        with tiers, tiers.held(both) as coming:
            found = coming.result(HUNG_S).modules.get("layer")
            read = found.up @ found.down
        del found, coming, tiers
        gc.collect()
        assert world.races == []
        del read


def test_an_edit_with_a_controlnet_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals, "work_of", lambda card: None)
    digest = "d" * 64
    card: Any = SimpleNamespace(name="n", modes=0, digest=digest, kind=ControlKind.FLUX, sees=None)
    with pretended(triton=False) as world:
        of = family("flux")
        net: Any = nn.Module.to(tiny_flux_control.net(), CUDA, torch.bfloat16)
        engine = Engine(
            of,
            Capacity(8, 10_000),
            lambda: 0.0,
            reusing=ReuseOptions(device=device_for(CUDA, 1 << 30)),
            controls=controls_of({digest: FluxControl(net, card)}, of.network, 16, 1),
        )
        row = tiny_flux.row(of, Spec("a", grid=GRID, steps=4))
        image = torch.randn(GRID[0] * GRID[1], tiny_flux.LATENT, dtype=torch.bfloat16)
        acting = Adapters(controls=(RowControl("n", digest, 1.0, 0, 4, image=image),))
        engine.batch.submit([replace(row, adapters=acting)])
        world.clear()
        while (report := engine.step()) is not None:
            assert not report.failed, report.failed[0].error.__cause__
        assert Counter(world.synchronisations) == {}
        assert world.races == []


def test_what_leaves_pageable_memory_waits_and_what_is_moved_does_not() -> None:
    with pretended(triton=False) as world:
        torch.zeros(3).to(CUDA)
        assert [told.what for told in world.synchronisations] == ["copy to the device"]
        world.clear()
        to_device(torch.zeros(3), CUDA)
        assert world.synchronisations == []


def test_what_is_computed_beyond_the_memory_of_the_device_is_refused() -> None:
    with pretended(triton=False, limit_bytes=4096) as world:
        kept = torch.zeros(512, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1024, device=CUDA)
        assert (world.live_bytes, world.peak_bytes) == (2048, 2048)
        del kept


def test_a_read_before_the_copy_was_waited_for_is_found() -> None:
    with pretended(triton=False) as world:
        beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's is not typed
        with torch.cuda.stream(beside):
            copy = to_device(torch.zeros(3), CUDA)
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            arrived.record()
        torch.cuda.current_stream().wait_event(arrived)
        copy.record_stream(torch.cuda.current_stream())
        copy + 1
        assert world.races == []
        with torch.cuda.stream(beside):
            late = to_device(torch.zeros(3), CUDA)
        late + 1
        del late
        found = Counter(told.what for told in world.races)
        assert found == {"used before it was written": 1, "freed while another stream may use it": 1}


# The memory of steps in the shapes of published checkpoints, beside what the engine reckons for them.
#
# Tensors have shapes and no values here. What a token's activations take is measured as a profile does, of one and of
# two rows of 1024²; the engine's reckoning is held against one row of them, and several of 2048².


BITS: Final = 4
TIER_BYTES: Final = 14 << 30
SIZES: Final = ((1024, 1), (2048, 8))
"""Sides of pictures in pixels, and rows."""
Off = Mapping[tuple[int, int, bool], float]
"""What is reckoned over what is needed, by pixels, rows and whether they are masked."""


@dataclass(frozen=True)
class Published:
    text_tokens: int
    depths: Sequence[Mapping[str, Any]] = ({},)
    """Changes of its configuration: few equal blocks, and some more; or none."""
    left: int = 0
    """How many times as many more as these the checkpoint has."""
    token_pixels: int = 16
    off: Off = field(default_factory=dict)
    """What is known to be more than a tenth off."""


def layers(text_tokens: int, least: int, off: Off | None = None, **of: tuple[int, int]) -> Published:
    """A transformer: kinds of layers, so many of each for one of the first kind, and in the checkpoint."""
    depths = [{name: many * each for name, (each, _) in of.items()} for many in (least, least + 1)]
    each, most = next(iter(of.values()))
    return Published(text_tokens, depths, most // each - least, off=off or {})


FAMILIES: Final = {
    "sdxl": Published(
        77, [{"transformer_layers_per_block": (1, 2, deep)} for deep in (2, 3)], left=8, token_pixels=32
    ),
    "sd": Published(77, token_pixels=64),
    "flux": layers(512, 2, num_layers=(1, 19), num_single_layers=(2, 38)),
    "flux2": layers(512, 2, num_layers=(1, 8), num_single_layers=(6, 48)),
    "chroma": layers(512, 2, num_layers=(1, 19), num_single_layers=(2, 38)),
    "sd3": layers(333, 4, num_layers=(1, 38)),
    "qwen-image": layers(512, 3, num_layers=(1, 60)),
    "z-image": layers(512, 3, {(2048, 8, True): 1.135}, n_layers=(1, 30)),
}


def family_of(name: str, changed: Mapping[str, Any]) -> ModelFamily:
    if name == "flux":
        return flux({**REAL, **changed}, torch.bfloat16, CUDA)
    return models.family(name, published=True, dtype=torch.bfloat16, device=CUDA, changed=changed)


def entry_of(family: ModelFamily, tokens: int, world: World) -> Entry:
    """A template's entry in pinned memory; blocks share its tensors, whose values nobody reads."""

    @lru_cache(None)
    def tensors(channels: int, bits: int) -> tuple[torch.Tensor, ...]:
        if bits == 0:
            return (world.pin(torch.zeros(tokens, channels, dtype=torch.float32)),)
        levels = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8)
        return tuple(world.pin(each) for each in (levels, torch.zeros(channels), torch.zeros(channels)))

    def kept(parts: dict[str, int]) -> CachedBlock:
        return CachedBlock(
            **{
                name: StoredTensor(*tensors(channels, bits_of(name, BITS)))
                for name, channels in parts.items()
                if name != "hidden"
            }
        )

    return Entry(0.5, tuple(kept(dict(spec.parts)) for spec in family.specs))


class Steps:
    """Steps of a family's rows, all of one kind."""

    def __init__(self, name: str, family: ModelFamily, world: World) -> None:
        self.family, self._world, self._of = family, world, FAMILIES[name]

    def rows(self, pixels: int, count: int, *, masked: bool) -> list[Row]:
        rows = Rows(self.family, pixels // self._of.token_pixels, self._of.text_tokens)
        edits = [WorkloadEdit(each, 0, 0.11, (each + 0.5) / count, 0.5, 4) for each in range(count)]
        made = [rows.masked(edit) if masked else rows.row(edit, reuse=False) for edit in edits]
        if not masked:
            return made
        entry = entry_of(self.family, rows.tokens + made[0].inputs.companions, self._world)
        taken = CachedTemplate("t", made[0].grid, (entry,))
        return [changed(row, template=taken, degree=1, step=1) for row in made]

    def peak_bytes(self, rows: Sequence[Row]) -> int:
        """Most memory of the second of two steps, beyond the model's weights."""
        gc.collect()
        before = self._world.live_bytes
        with torch.inference_mode():
            on_device = [
                replace(row, latent=row.latent.pin_memory().to(CUDA, non_blocking=True)) for row in rows
            ]
            placed = [place_inputs(row, self.family) for row in on_device]
            assembly = assemble(self.family, on_device, placed)
            uses = self._uses(on_device)
            denoise_step(self.family, assembly, on_device, uses())
            gc.collect()
            self._world.clear()
            denoise_step(self.family, assembly, on_device, uses())
        return self._world.peak_bytes - before

    def _uses(self, rows: Sequence[Row]) -> Callable[[], Sequence[BlockInputs]]:
        device = device_for(CUDA, TIER_BYTES)
        taken = [
            CachedTokens(entry.modes, Slabs(entry, row.region, row.own_tokens[0], self.family, device=device))
            for row in rows
            if row.reuse.template is not None and row.region is not None
            for entry in row.reuse.template.entries
        ]
        return lambda: [BlockInputs(taken=each) for each in taken]


def told(name: str, sizes: Sequence[tuple[int, int]], changed: Mapping[str, Any], world: World) -> Tensor:
    """Bytes that the engine reckons, and that steps need: of each size, in full and masked."""
    with torch.inference_mode():
        family = family_of(name, changed)
    published = FAMILIES[name]
    card = CARD.model_copy(update={"max_text_tokens": published.text_tokens})
    meter = StepMeter(Checkpoint(card, family, None), BITS)
    side = 1024 // published.token_pixels
    text = published.text_tokens if meter.text_tokens else 0
    one = RowSize(side, side, text, (BlockMode.FULL,) * family.depth).beside(meter.companions, meter.prefix)
    most, even = activation_bytes(meter, [StepShape((one,)), StepShape((one, one))])
    budget = StepBudget(activation_bytes=most, even_bytes=even)
    steps = Steps(name, family, world)
    found = []
    for (pixels, count), masked in product(sizes, (False, True)):
        rows = steps.rows(pixels, count, masked=masked)
        needed = steps.peak_bytes(rows)
        found.append((step_bytes(rows, budget, family), needed))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("flux", ((2048, 4),)),
        ("sd", SIZES[:1]),
        *(pytest.param(name, SIZES, marks=pytest.mark.long) for name in FAMILIES),
    ],
)
def test_the_engine_reckons_a_steps_memory_within_a_tenth(
    name: str, sizes: Sequence[tuple[int, int]]
) -> None:
    """Of as many equal blocks as the checkpoint has: each adds as many bytes as the ones that are measured."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    published = FAMILIES[name]
    with pretended(values=False, limit_bytes=1 << 40) as world:
        few, *some = (told(name, sizes, changed, world) for changed in published.depths)
        assert world.races == []
    more = sum((each - few for each in some), torch.zeros_like(few))
    reckoned, needed = (few + published.left * more).unbind(1)
    cases = [(*size, masked) for size, masked in product(sizes, (False, True))]
    ratios = dict(zip(cases, (reckoned / needed).tolist(), strict=True))
    assert {case: ratio for case, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == pytest.approx(
        published.off, abs=0.01
    )
