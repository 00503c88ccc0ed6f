"""Profiling: what is measured tells the weights, also under adapters; and files of profiles."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from giornata.packed.low_rank import BatchLoras, LoraSpans
from giornata.planning.cost_model import Profile
from giornata.planning.operations import COMPUTE, LOAD, NetworkOperations, StepCosts
from giornata.wire.adapters import ControlWork
from giornata.wire.errors import Failed
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.slabs import Device
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.__main__ import check_fits, report
from giornata_denoiser.profiling.fitting import device_name, proportional_fit, read_profile, write_profile
from giornata_denoiser.profiling.measuring import (
    MORE_ROUNDS,
    RandomLoras,
    StepMeter,
    measure_medians,
    random_control,
    shared_values,
)
from giornata_denoiser.profiling.mixtures import ProfileScope, RowSize, StepShape, TokensBeside, list_mixtures
from giornata_denoiser.rows.template import StoredTensor
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.systems.networks import PLAIN_4, plain
from tests.fakes import tiny_driven
from tests.fakes.fleet import CARD
from tests.fakes.profiles import PROFILE
from tests.present import present
from tests.unit.denoiser.engine.test_masked import OF
from tests.unit.denoiser.families import test_unet_engine

# Profiling with a meter that knows the truth: weights come back in spite of noise and drift.


BLOCKS = 4
TRUE = StepCosts((3.0, 1.6, 0.02, 2e-6, 0.0, 0.0, 0.03, 0.7, 0.05), (0.05, 4e-7))
WORK = ControlWork(text=0.1, image=0.2, pair=1e-4, text_pair=1e-4, shared=True)
EXTENT = ProfileScope(
    CARD.model_copy(update={"native_size": 256, "takes_true_cfg": True}), BLOCKS, rows=8, tokens=65_536
)
PREVIEW_MAP = PreviewMap(torch.zeros(16, 3), torch.zeros(3))


class KnownMachine(StepMeter):
    """Stands for a meter: its times follow `TRUE`, but for what `disturb` makes of them."""

    def __init__(
        self, disturb: Callable[[float], float] = lambda ms: ms, work: ControlWork | None = WORK
    ) -> None:
        self._disturb, self._work = disturb, work
        self.measured = 0

    @property
    def operations(self) -> NetworkOperations:
        return PLAIN_4

    @property
    def companions(self) -> TokensBeside:
        return lambda grid: 0

    def prefix(self, grid: tuple[int, int]) -> int:
        return 0

    @property
    def lora_weights(self) -> float:
        return 0.25

    @property
    def control_work(self) -> ControlWork | None:
        return self._work

    def step_ms(self, mixture: StepShape) -> float:
        self.measured += 1
        return self._disturb(TRUE.step_ms(mixture.work(PLAIN_4)))

    def step_bytes(self, mixture: StepShape) -> int:
        return round(1000 * mixture.length)

    def load_ms(self, size: RowSize) -> float:
        return self._disturb(TRUE.load_ms(self.load_bytes(size)))

    def load_bytes(self, size: RowSize) -> int:
        return (
            int(size.height * size.width * (1 - size.ratio))
            * (2 if size.modes[0] is BlockMode.KV else 1)
            * 256
        )


class Far(Device):
    """Stands for a GPU: whole tensors move as they are stored, whatever is gathered of them, or cannot."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.brought: list[StoredTensor] = []

    def bring(self, stored: StoredTensor) -> StoredTensor:
        if self.broken:
            raise RuntimeError("out of memory")
        self.brought.append(stored)
        return stored

    def moved_bytes(self, stored: StoredTensor, slab_bytes: int) -> int:
        return stored.size_bytes


def meter_with(device: Device) -> StepMeter:
    checkpoint = Checkpoint(CARD, OF, PREVIEW_MAP)
    ticks = iter(range(1000))
    return StepMeter(checkpoint, 8, device, lambda: float(next(ticks)))


@pytest.mark.parametrize("mode", [BlockMode.KV, BlockMode.HIDDEN])
def test_loads_are_fitted_to_the_bytes_that_an_engine_counts(mode: BlockMode) -> None:
    device = Far()
    meter = meter_with(device)
    size = RowSize(4, 6, 5, (mode,) * BLOCKS, 0.3)
    bytes_moved = meter.load_bytes(size)
    for _ in range(2):  # nothing is left of the first load
        device.brought.clear()
        assert meter.load_ms(size) == 1000
        assert sum(part.size_bytes for part in device.brought) == BLOCKS * bytes_moved


def test_a_load_that_fails_is_no_measurement() -> None:
    meter = meter_with(Far(broken=True))
    with pytest.raises(RuntimeError, match="out of memory"):
        meter.load_ms(RowSize(4, 6, 5, (BlockMode.KV,) * BLOCKS, 0.3))


def measured(machine: KnownMachine, *, quick: bool) -> fitting.ProfileMeasurements:
    return fitting.measure(machine, replace(EXTENT, quick=quick))


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_measured_tells_all_weights_apart(quick: bool) -> None:
    found = measured(KnownMachine(), quick=quick)
    fit = fitting.fit_samples(COMPUTE, found.step_samples)
    np.testing.assert_allclose(fit.weights, TRUE.compute, rtol=1e-4)
    assert not fit.derived
    np.testing.assert_allclose(fitting.fit_samples(LOAD, found.load_samples).weights, TRUE.load, rtol=1e-6)
    assert found.activation_bytes == pytest.approx((1000, 1000), rel=0.01)


def test_without_controlnets_their_weight_follows_from_the_others() -> None:
    extent = replace(EXTENT, quick=True, controls=False)
    found = fitting.measure(KnownMachine(work=None), extent)
    assert not any(row.controlled for mixture in list_mixtures(extent, 0) for row in mixture.rows)
    fit = fitting.fit_samples(COMPUTE, found.step_samples)
    assert fit.derived == ("control",)
    np.testing.assert_allclose(fit.weights[:-1], TRUE.compute[:-1], rtol=1e-4)
    assert fit.weights[COMPUTE.index("control")] == fit.weights[COMPUTE.index("linear")]


def test_noise_moves_predictions_by_less_than_itself() -> None:
    chance = np.random.default_rng(0)
    found = measured(KnownMachine(lambda ms: ms * chance.uniform(0.9, 1.1)), quick=False)
    fit = fitting.fit_samples(COMPUTE, found.step_samples)
    for mixture in list_mixtures(EXTENT, seed=99):
        assert fit.predict(mixture.work(PLAIN_4)) == pytest.approx(
            TRUE.step_ms(mixture.work(PLAIN_4)), rel=0.1
        )
    assert fit.r2 > 0.98
    unseen = fitting.cross_validate(fit.names, found.step_samples)
    assert fit.error_p50 <= unseen.error_p50 < 0.1


def test_a_short_step_is_predicted_as_well_as_a_long_one() -> None:
    """Long ones here take more than linear costs say: an absolute fit would leave the short ones to them."""
    found = measured(KnownMachine(lambda ms: ms * (1 + 0.1 * math.log10(ms))), quick=False)
    samples = found.step_samples
    shortest = min(samples, key=lambda sample: sample.ms)
    (said,) = fitting.predictions(fitting.fit_samples(COMPUTE, samples), [shortest])
    assert abs(said.error) < 0.15


def test_drift_does_not_follow_size() -> None:
    """Each measurement is slower than the one before: in order of size, large steps would look dearer than they are."""
    times = iter(range(10**6))
    sizes = list(range(200))
    found = measure_medians(sizes, lambda _: float(next(times)), rounds=5, seed=0)
    assert abs(np.corrcoef(sizes, found)[0, 1]) < 0.2
    assert sorted(found) != found


def test_every_measurement_is_told() -> None:
    machine, told = KnownMachine(), list[int]()

    def track(order: Sequence[int]) -> Iterator[int]:
        for index in order:
            yield index
            told.append(index)

    quick = replace(EXTENT, quick=True)
    found = fitting.measure(machine, quick, track)
    assert len(told) == fitting.QUICK_ROUNDS * (len(found.steps) + len(found.load_samples))
    assert machine.measured == fitting.QUICK_ROUNDS * len(found.steps)


def test_what_is_disturbed_is_measured_again_until_it_is_stable() -> None:
    """One of two times of the third thing, and of the sixth, is far too long; the seventh is never the same twice."""
    taken = list[int]()

    def took(thing: int) -> float:
        taken.append(thing)
        count = taken.count(thing)
        return 1018.0 if thing in {3, 6} and count == 1 else 10.0 * (3**count if thing == 7 else 1)

    found = measure_medians(range(10), took, rounds=2, seed=0)
    assert [ms for thing, ms in enumerate(found) if thing != 7] == [10.0] * 9
    assert [taken.count(thing) for thing in range(10)] == [2, 2, 2, 3, 2, 2, 3, 2 + MORE_ROUNDS, 2, 2]


def test_a_fit_that_does_not_tell_what_was_measured_is_refused_by_its_worst_samples() -> None:
    found = measured(KnownMachine(), quick=True)

    def check(found: fitting.ProfileMeasurements, least_r2: float = 0.9) -> None:
        check_fits(profiled(found), found, {}, least_r2)

    check(found)
    slow = max(range(len(found.steps)), key=lambda index: len(found.steps[index].mixture.rows))
    steps = [
        step._replace(ms=step.ms * (50 if index == slow else 1)) for index, step in enumerate(found.steps)
    ]
    spoilt = replace(found, steps=tuple(steps))
    with pytest.raises(
        Failed, match=rf"of computing fits no line.*Worst: .* {steps[slow].ms:.3f} ms measured"
    ) as told:
        check(spoilt)
    assert told.value.accepted == "0.9 and more"
    check(spoilt, -1e9)
    alike = [sample._replace(ms=1 + 0.01 * (index % 2)) for index, sample in enumerate(found.load_samples)]
    check(replace(found, load_samples=tuple(alike)))  # R² says nothing where all times are alike
    wild = [sample._replace(ms=1 + 5.0 * (index % 2)) for index, sample in enumerate(found.load_samples)]
    with pytest.raises(Failed, match=r"of loading fits no line.*bytes"):
        check(replace(found, load_samples=tuple(wild)))


def profiled(found: fitting.ProfileMeasurements) -> Profile:
    return fitting.profile(
        Checkpoint(CARD, tiny_flux.family(fill=True), PREVIEW_MAP),
        compute=fitting.fit_samples(COMPUTE, found.step_samples),
        load=fitting.fit_samples(LOAD, found.load_samples),
        activation=(2048.0, 1024.0),
    )


def test_mixtures_are_of_every_kind_and_within_the_extent() -> None:
    every = list_mixtures(EXTENT, 0)
    rows = [row for mixture in every for row in mixture.rows]
    assert {mode for row in rows for mode in row.modes} == set(BlockMode)
    assert any(len(set(row.modes)) > 1 for row in rows)
    assert {len(mixture.rows) for mixture in every} == set(range(1, 9))
    assert any(row.guided for row in rows)
    assert len({row.text for row in rows}) == 2
    sets = {tuple(row.lora for row in mixture.rows) for mixture in every if len(mixture.rows) == 8}
    assert {(1,) * 8, (1, 1, 2, 2, 3, 3, 4, 4)} <= sets
    acting = {tuple(row.controlled for row in mixture.rows) for mixture in every}
    assert {(True,), (True, True), (True, False), (True,) * 8, (True,) * 4 + (False,) * 4} <= acting
    assert all(m.length <= EXTENT.most_tokens for m in every if len(m.rows) > 1)
    assert every == list_mixtures(EXTENT, 0) != list_mixtures(EXTENT, 1)
    fill = replace(EXTENT, card=CARD)
    assert not any(row.guided for mixture in list_mixtures(fill, 0) for row in mixture.rows)
    assert len(list_mixtures(replace(EXTENT, quick=True), 0)) < len(every) / 2


@given(st.integers(4, 64), st.integers(4, 64), st.floats(0.01, 0.99))
def test_a_mask_leaves_something_out_and_computes_something(height: int, width: int, ratio: float) -> None:
    size = RowSize(height, width, 7, (BlockMode.KV,), ratio)
    (shape,) = size.shapes
    assert 1 <= shape.computed < shape.image
    assert size.tokens == 7 + shape.computed


def test_a_few_steps_and_the_number_of_operations_tell_the_costs() -> None:
    true = StepCosts((5.0, 0.3, *(2e-7,) * 3, 0.0))
    rows = [RowSize(side, side, 6, (BlockMode.FULL,) * BLOCKS) for side in (8, 12, 16)]
    steps = [StepShape((row,)) for row in rows] + [StepShape((rows[0],) * 3)]
    samples = [fitting.FitSample(step.work(PLAIN_4), true.step_ms(step.work(PLAIN_4))) for step in steps]
    np.testing.assert_allclose(proportional_fit(samples).weights, true.compute, rtol=1e-5)
    calls, sequences, *kinds, gathered, low_rank, segments, control = proportional_fit(samples[:1]).weights
    assert {low_rank, control} == set(kinds)
    assert len(set(kinds)) == 1
    assert kinds[0] > 0 == calls == sequences == gathered == segments


def test_the_report_names_weights_units_and_the_worst() -> None:
    found = measured(KnownMachine(), quick=True)
    text = report(profiled(found), found)
    for part in (
        "Computing: R² 1.0000",
        "ms a multiplication of linear layers",
        "worst: ",
        "2.0 KiB",
    ):
        assert part in text


# Steps measured under adapters: LoRAs and ControlNets of random weights compute what the profile counts of
# them.


FAMILIES: dict[str, Callable[[], ModelFamily]] = {
    "flux-fill": lambda: tiny_flux.family(fill=True),
    "sd3": lambda: tiny_driven.family("sd3"),
    "unet-fill": lambda: test_unet_engine.family(fill=True),
}
"""Families that have ControlNets, each with what its network sees beside the ControlNet."""


def counting(of: ModelFamily, counter: FlopCounterMode) -> StepMeter:
    """A meter whose clock counts multiplications: a second each."""
    return StepMeter(Checkpoint(CARD, of, PREVIEW_MAP), EXACT, clock=lambda: counter.get_total_flops() / 2)


def test_steps_are_measured_with_the_factors_of_every_linear_layer() -> None:
    """A set of LoRAs computes what it says: as many multiplications a token as its factors have weights."""
    meter = meter_with(Far())
    layers = OF.network.layers
    loras = RandomLoras(layers)
    linear = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
    assert meter.lora_weights == sum(16 * (each.in_features + each.out_features) for each in linear.values())
    one, other = loras.set_of(1), loras.set_of(2)
    assert one is not None is not other
    assert one is loras.set_of(1) is not other
    assert set(one.modules) == set(linear)
    assert one.size_bytes == 4 * loras.weights, "float32 as the layers are"
    size = RowSize(4, 4, 8, (BlockMode.FULL,) * OF.depth)
    mixture = StepShape((replace(size, lora=1), replace(size, lora=2), size)).adapted(
        meter.lora_weights, None
    )
    work = mixture.work(meter.operations)
    assert work.segments == 2
    tokens = 2 * (8 + 16)
    assert 0.5 < work.low_rank / (tokens * meter.lora_weights) < 1.5
    met = list[str]()

    def note(owners: BatchLoras, *where: Any) -> LoraSpans:
        found = over(owners, *where)
        met.extend(span.low_rank.name for span in found.of)
        return found

    over = BatchLoras.over
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchLoras, "over", note)
        assert meter.step_ms(mixture) > 0
    assert set(met) == {"random 1", "random 2"}


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_measured_with_a_controlnet_that_computes_what_is_counted(name: str) -> None:
    of, counter = FAMILIES[name](), FlopCounterMode(display=False)
    meter = counting(of, counter)
    size = RowSize(6, 4, meter.text_tokens and 5, (BlockMode.FULL,) * of.depth)
    acting = StepShape((replace(size, controlled=True),) * 2 + (size,)).adapted(0.0, meter.control_work)
    with counter:
        added = (meter.step_ms(acting) - meter.step_ms(StepShape((size,) * 3))) / 1e3
    counted = acting.work(meter.operations).control
    assert counted > 0
    assert added == pytest.approx(counted, rel=0.2), "attention's operations are not all counted by torch"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_controlnet_is_of_the_networks_kind_and_freed_afterwards(name: str) -> None:
    of = FAMILIES[name]()
    made = present(random_control(of.network, 16 if name.startswith("unet") else CARD.pixel_multiple))
    net: nn.Module = made.net.net
    assert made.net is made.net, "made once"
    tensors = [*net.parameters(), *net.buffers()]
    assert {(each.dtype, each.device) for each in tensors} == {(of.dtype, of.device)}
    assert all(bool(each.isfinite().all()) and bool(each.any()) for each in tensors)
    gone = weakref.ref(net)
    del made, net, tensors
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("network", [860_000_000, 2_570_000_000, 11_900_000_000])
def test_weights_of_a_controlnet_take_a_twentieth_of_a_large_network(network: int) -> None:
    half = [network // 200] * 100
    assert shared_values(half, network) == network // 20
    assert shared_values([network // 10, 64], network) == network // 10, (
        "the largest has to be there as a whole"
    )


def test_weights_that_a_cache_can_hold_are_not_read_again() -> None:
    assert shared_values([640, 64, 1280], 4096) == 640 + 64 + 1280
    assert shared_values([2**20] * 64, 2**27) == 2**25


# Profile files: written as a whole, read back equal, refused where they are of something else.


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(CARD, OF, PreviewMap(torch.zeros(16, 3), torch.zeros(3)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    told = {"device": device_name(torch.device("cpu")), "blocks": OF.operations.specs}
    return PROFILE.model_copy(update={**told, "model_digest": CARD.digest})


def test_what_is_written_is_read_and_nothing_else_is_left(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile
) -> None:
    path = tmp_path / "new" / "profile.json"
    write_profile(path, PROFILE)
    write_profile(path, profile)
    assert read_profile(path, checkpoint) == profile
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        (
            "model_digest",
            "eeeeeeeeeeeeeeee",
            "of another model; .*Received: eeeeeeeeeeee. Accepted: dddddddddddd.",
        ),
        ("blocks", plain(57), "of another network; .*Received: 57 blocks .*Accepted: 4 blocks"),
        ("dtype", "bfloat16", "of another dtype; .*Received: bfloat16. Accepted: float32."),
        ("device", "NVIDIA H100", "of another device; .*Received: NVIDIA H100. Accepted: .*threads: "),
        ("derived", "a formula", "not measured, but derived from a formula.*measure it again with"),
        ("schema_version", 2, "received a profile of schema 2, accepted is 3"),
        ("schema_version", 4, "received a profile of schema 4, accepted is 3"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile, field: str, value: Any, what: str
) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile.model_copy(update={field: value}))
    with pytest.raises(Failed, match=what) as caught:
        read_profile(path, checkpoint)
    assert "giornata profile" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1, 2"])
def test_what_is_no_profile_is_refused_by_name(
    tmp_path: Path, checkpoint: Checkpoint, content: bytes | None
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Failed, match=r"profile\.json"):
        read_profile(path, checkpoint)
