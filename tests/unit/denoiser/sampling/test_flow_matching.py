"""Grids and steps of flow matching equal diffusers' scheduler and pipelines bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_inpaint
from diffusers.pipelines.flux2 import pipeline_flux2_klein_inpaint
from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3_inpaint
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import InvalidField
from giornata.wire.samplers import WITH_LIGHTNING, Sampler
from giornata_denoiser.engine.stepping import blend
from giornata_denoiser.families.sampling.flow_matching import (
    FlowMatching,
    calculate_shift,
    compute_empirical_mu,
    shifted_always,
    shifted_by_size,
    shifted_by_steps,
)
from giornata_denoiser.rows.track import SamplerTable
from giornata_lab.bench.compute.sampled import Sampled, stepped
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import SCHEDULER

FLOW = FlowMatching(SCHEDULER, shifted_by_size)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHIFTED = {**SCHEDULER, "use_dynamic_shifting": False}
GRIDS = pytest.mark.parametrize(
    ("steps", "strength", "tokens"), [(4, 1.0, 12), (28, 0.6, 4096), (7, 0.33, 256), (50, 0.01, 1024)]
)


def track(steps: int, strength: float, cells: int, of: FlowMatching = FLOW) -> SamplerTable:
    return of.track(sampler=Sampler.EULER, steps=steps, strength=strength, cells=cells)


def begun(module: Any, name: str, config: dict[str, Any], strength: float, **timesteps: Any) -> Any:
    """A scheduler as the inpainting pipeline `name` of `module` leaves it before its loop."""
    kind = getattr(module, name)
    pipeline: Any = kind.__new__(kind)
    object.__setattr__(pipeline, "scheduler", FlowMatchEulerDiscreteScheduler.from_config(config))
    _, steps = module.retrieve_timesteps(pipeline.scheduler, device="cpu", **timesteps)
    times, left = pipeline.get_timesteps(steps, strength, "cpu")
    assert len(times) == left
    return pipeline.scheduler


def even(steps: int) -> list[float]:
    spaced: list[float] = np.linspace(1.0, 1 / steps, steps).tolist()
    return spaced


def flux_scheduler(config: dict[str, Any], steps: int, strength: float, tokens: int) -> Any:
    mu = pipeline_flux_inpaint.calculate_shift(tokens)
    return begun(pipeline_flux_inpaint, "FluxInpaintPipeline", config, strength, sigmas=even(steps), mu=mu)


def assert_same_grid(mine: SamplerTable, scheduler: Any) -> None:
    begin = scheduler.begin_index
    assert torch.equal(mine.levels, scheduler.sigmas[begin:])
    assert torch.equal(mine.times, scheduler.timesteps[begin:])
    assert torch.equal(mine.matrices[:, 0], torch.stack(
        (torch.zeros(mine.steps), scheduler.sigmas[begin:].diff(), torch.ones(mine.steps)), dim=1
    ))  # fmt: skip
    assert mine.levels[-1] == 0


@pytest.mark.parametrize("config", [SCHEDULER, SHIFTED])
@GRIDS
def test_grid_is_that_of_flux(config: dict[str, Any], steps: int, strength: float, tokens: int) -> None:
    mine = track(steps, strength, tokens, FlowMatching(config, shifted_by_size))
    assert_same_grid(mine, flux_scheduler(config, steps, strength, tokens))


@GRIDS
def test_grid_is_that_of_klein(steps: int, strength: float, tokens: int) -> None:
    mu = pipeline_flux2_klein_inpaint.compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    theirs = begun(
        pipeline_flux2_klein_inpaint, "Flux2KleinInpaintPipeline", SCHEDULER, strength,
        sigmas=even(steps), mu=mu,
    )  # fmt: skip
    assert_same_grid(track(steps, strength, tokens, FlowMatching(SCHEDULER, shifted_by_steps)), theirs)


@GRIDS
@pytest.mark.parametrize("config", [{"shift": 3.0, "num_train_timesteps": 1000}, SCHEDULER])
def test_grid_is_that_of_sd3(config: dict[str, Any], steps: int, strength: float, tokens: int) -> None:
    by_size = {"mu": calculate_shift(tokens, config)} if config.get("use_dynamic_shifting") else {}
    theirs = begun(
        pipeline_stable_diffusion_3_inpaint, "StableDiffusion3InpaintPipeline", config, strength,
        num_inference_steps=steps, **by_size,
    )  # fmt: skip
    assert_same_grid(track(steps, strength, tokens, FlowMatching(config, shifted_always)), theirs)


@given(st.integers(1, 16384), st.integers(1, 200))
def test_shifts_are_those_of_diffusers(tokens: int, steps: int) -> None:
    assert calculate_shift(tokens, SCHEDULER) == pipeline_flux_inpaint.calculate_shift(tokens)
    theirs = pipeline_flux2_klein_inpaint.compute_empirical_mu(tokens, steps)
    assert compute_empirical_mu(tokens, steps) == pytest.approx(theirs, rel=1e-12)


def test_strength_that_leaves_no_step_is_refused_by_name() -> None:
    with pytest.raises(InvalidField) as refused:
        track(4, 1e-20, 16)
    assert refused.value.field == "strength"


def test_levels_that_end_at_a_terminal_one_take_two_steps() -> None:
    """With one the scheduler divides by 0."""
    terminal = FlowMatching(SCHEDULER | {"shift_terminal": 0.02}, shifted_by_size)
    assert bool(track(2, 1.0, 12, terminal).levels.isfinite().all())
    with pytest.raises(InvalidField) as refused:
        track(1, 1.0, 12, terminal)
    assert (refused.value.field, refused.value.accepted) == ("num_inference_steps", "at least 2")
    assert track(1, 1.0, 12).steps == 1


@pytest.mark.parametrize("cells", [16, 4096])
def test_lightnings_levels_are_shifted_by_3_whatever_the_size(cells: int) -> None:
    """Also where the checkpoint stretches its own to end at a terminal one, of which one step has none."""
    of = FlowMatching({"use_dynamic_shifting": True, "shift_terminal": 0.02}, shifted_by_size, WITH_LIGHTNING)
    for steps in (1, 4, 8):
        found = of.track(sampler=Sampler.EULER_LIGHTNING, steps=steps, strength=1.0, cells=cells)
        even = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
        torch.testing.assert_close(found.levels.double(), 3 * even / (1 + 2 * even), atol=1e-6, rtol=0)
    own = of.track(sampler=Sampler.EULER, steps=4, strength=1.0, cells=cells)
    assert float(own.levels[-2]) == pytest.approx(0.02)
    with pytest.raises(InvalidField, match="does not take the sampler euler_lightning"):
        FLOW.track(sampler=Sampler.EULER_LIGHTNING, steps=4, strength=1.0, cells=cells)


def test_another_sampler_is_refused_with_those_that_are_offered() -> None:
    with pytest.raises(InvalidField) as refused:
        FLOW.track(sampler=Sampler.HEUN, steps=4, strength=1.0, cells=16)
    assert (refused.value.field, refused.value.accepted) == ("sampler", "euler")


@DTYPES
def test_a_mixed_batch_steps_like_one_scheduler_per_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grids: Sequence[tuple[int, float, int]] = [(4, 1.0, 12), (9, 0.5, 20), (6, 0.8, 7)]
    schedulers = [flux_scheduler(SCHEDULER, *spec) for spec in grids]
    latents = [torch.randn(tokens, 8).to(dtype) for _, _, tokens in grids]
    mine = [Sampled(track(*spec), (1, spec[2]), latent) for spec, latent in zip(grids, latents, strict=True)]
    for step in range(4):
        velocity = [torch.randn_like(latent) for latent in latents]
        mine = stepped(mine, velocity)
        latents = [
            s.step(v[None], s.timesteps[s.begin_index + step], x[None], return_dict=False)[0][0]
            for s, v, x in zip(schedulers, velocity, latents, strict=True)
        ]
        for row, latent in zip(mine, latents, strict=True):
            assert row.memory is None
            assert row.latent.dtype is dtype
            if dtype is torch.float32:
                assert torch.equal(row.latent, latent)
            else:  # diffusers rounds the product, too, and on a CPU the length of the step
                torch.testing.assert_close(row.latent, latent, atol=0.03, rtol=0.02)


def test_a_row_of_one_state_steps_alike_beside_rows_with_memory() -> None:
    row = Sampled(track(4, 1.0, 12), (3, 4), torch.randn(12, 8))
    matrices = torch.randn(4, 2, 4)
    matrices[:, :, 0] = 0
    other = replace(row, track=replace(row.track, matrices=matrices))
    outputs = [torch.randn(12, 8)] * 2
    assert torch.equal(stepped([row, other], outputs)[0].latent, stepped([row], outputs[:1])[0].latent)


@DTYPES
def test_noise_is_scaled_like_the_scheduler_does(dtype: torch.dtype) -> None:
    image, noise = torch.randn(2, 12, 8).to(dtype)
    scheduler = flux_scheduler(SCHEDULER, 5, 0.7, 12)
    theirs = scheduler.scale_noise(
        image[None], scheduler.timesteps[scheduler.begin_index][None], noise[None]
    )[0]
    mine = track(5, 0.7, 12).noised(image, noise, 0)
    assert mine.dtype is dtype
    if dtype is torch.float32:
        assert torch.equal(mine, theirs)
    else:  # diffusers rounds the levels, too
        torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0.01)


@DTYPES
def test_blend_keeps_the_step_inside_and_the_noised_template_outside(dtype: torch.dtype) -> None:
    latent, image, noise = torch.randn(3, 6, 4).to(dtype)
    mask = torch.tensor([1, 0, 1, 0, 0, 1]).to(dtype)[:, None].expand(6, 4)
    outside = track(4, 1.0, 6).noised(image, noise, 2)
    blended = blend(latent, outside, mask)
    assert torch.equal(blended[[0, 2, 5]], latent[[0, 2, 5]])
    assert torch.equal(blended[[1, 3, 4]], outside[[1, 3, 4]])
    assert torch.equal(track(4, 1.0, 6).noised(image, noise, 4), image)


@DTYPES
def test_guidance_combines_as_the_pipeline_writes_it(dtype: torch.dtype) -> None:
    positive, negative = torch.randn(2, 6, 4).to(dtype)
    combined = tiny_flux.family().network.guided(positive, negative, torch.full((6, 1), 2.7))
    assert torch.equal(combined, negative + 2.7 * (positive - negative))
