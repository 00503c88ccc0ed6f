"""Steps measured under adapters: LoRAs and ControlNets of random weights compute what the profile counts of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from giornata.packed.low_rank import LowRankFactors, SequenceLoras
from giornata.planning.operations import COMPUTE
from giornata.planning.regression import LinearFit
from giornata.planning.specs import taking_modes
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import EXACT
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.profiling import making
from giornata_denoiser.profiling.controls import random_control, shared_values
from giornata_denoiser.profiling.loras import RandomLoras
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import ProfileScope, RowSize, StepShape
from tests.fakes import tiny_driven, tiny_flux
from tests.unit.denoiser.engine.test_rehearsal import CARD, PREVIEW_MAP
from tests.unit.denoiser.families import test_unet_engine
from tests.unit.denoiser.profiling.test_profiling import Far, meter_with

FAMILIES: dict[str, Callable[[], ModelFamily]] = {
    "flux": tiny_flux.family,
    "flux-fill": lambda: tiny_flux.family(fill=True),
    "sd3": lambda: tiny_driven.family("sd3"),
    "unet": test_unet_engine.family,
    "unet-fill": lambda: test_unet_engine.family(fill=True),
}
"""Families that have ControlNets."""


def counting(of: ModelFamily, counter: FlopCounterMode) -> StepMeter:
    """A meter whose clock counts multiplications: a second each."""
    return StepMeter(Checkpoint(CARD, of, PREVIEW_MAP), EXACT, clock=lambda: counter.get_total_flops() / 2)


def test_steps_are_measured_with_the_factors_of_every_linear_layer() -> None:
    """A set of LoRAs computes what it says: as many multiplications a token as its factors have weights."""
    meter = meter_with(Far())
    layers = tiny_flux.family().network.layers
    loras = RandomLoras(layers)
    linear = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
    assert meter.lora_weights == sum(16 * (each.in_features + each.out_features) for each in linear.values())
    one, other = loras.set_of(1), loras.set_of(2)
    assert one is not None is not other
    assert one is loras.set_of(1) is not other
    assert set(one.paths) == set(linear)
    assert one.size_bytes == 4 * loras.weights, "float32 as the layers are"
    size = RowSize(4, 4, 8, (BlockMode.FULL,) * tiny_flux.family().depth)
    mixture = StepShape((replace(size, lora=1), replace(size, lora=2), size)).adapted(
        meter.lora_weights, None
    )
    work = mixture.work(meter.operations)
    assert work.segments == 2
    tokens = 2 * (8 + 16)
    assert 0.5 < work.low_rank / (tokens * meter.lora_weights) < 1.5
    met = list[str]()

    def note(low_rank: SequenceLoras, path: str) -> LowRankFactors | None:
        met.append(low_rank.name)
        return factors(low_rank, path)

    factors = SequenceLoras.factors
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SequenceLoras, "factors", note)
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


def fitted(of: ModelFamily) -> LinearFit:
    """What a profile of a few small steps says, in multiplications."""
    counter = FlopCounterMode(display=False)
    meter = counting(of, counter)
    card = CARD.model_copy(update={"native_size": 64})
    modes, joint = taking_modes(of.specs), meter.text_tokens > 0
    controls = meter.control_work is not None
    extent = ProfileScope(card, of.depth, 1, 4096, quick=True, modes=modes, joint=joint, controls=controls)
    with counter:
        return making.fitted(COMPUTE, making.measure(meter, extent).step_samples)


def test_a_profile_has_a_measured_weight_of_controlnets() -> None:
    fit = fitted(tiny_flux.family())
    assert not fit.derived
    assert fit.weights[COMPUTE.index("control")] == pytest.approx(1e3, rel=0.3), "a second each"


def test_a_family_without_controlnets_has_the_weight_that_follows_from_linear_layers() -> None:
    fit = fitted(tiny_driven.family("chroma"))
    assert fit.derived == ("control",)
    assert fit.weights[COMPUTE.index("control")] == fit.weights[COMPUTE.index("linear")] > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_controlnet_is_of_the_networks_kind_and_freed_afterwards(name: str) -> None:
    of = FAMILIES[name]()
    made = random_control(of.network, 16 if name.startswith("unet") else CARD.pixel_multiple)
    assert made is not None
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
