"""Grids and step rule equal diffusers' scheduler and pipelines bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_inpaint
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import InvalidField
from giornata_denoiser.engine.stepping import blend
from giornata_denoiser.families.flux.schedule import FlowMatching, calculate_shift
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import SCHEDULER

FLOW = FlowMatching(SCHEDULER)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHIFTED = {**SCHEDULER, "use_dynamic_shifting": False}


def diffusers_scheduler(config: dict[str, Any], steps: int, strength: float, tokens: int) -> Any:
    """A scheduler as `FluxInpaintPipeline` leaves it before its loop."""
    pipeline: Any = pipeline_flux_inpaint.FluxInpaintPipeline.__new__(
        pipeline_flux_inpaint.FluxInpaintPipeline
    )
    object.__setattr__(pipeline, "scheduler", FlowMatchEulerDiscreteScheduler.from_config(config))
    mu = pipeline_flux_inpaint.calculate_shift(tokens)
    pipeline_flux_inpaint.retrieve_timesteps(
        pipeline.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu
    )
    timesteps, left = pipeline.get_timesteps(steps, strength, "cpu")
    assert len(timesteps) == left
    return pipeline.scheduler


@pytest.mark.parametrize("config", [SCHEDULER, SHIFTED])
@pytest.mark.parametrize(
    ("steps", "strength", "tokens"), [(4, 1.0, 12), (28, 0.6, 4096), (7, 0.33, 256), (50, 0.01, 1024)]
)
def test_grid_is_that_of_the_pipeline(
    config: dict[str, Any], steps: int, strength: float, tokens: int
) -> None:
    track = FlowMatching(config).track(steps=steps, strength=strength, cells=tokens)
    scheduler = diffusers_scheduler(config, steps, strength, tokens)
    begin = scheduler.begin_index
    assert torch.equal(track.levels, scheduler.sigmas[begin:])
    assert torch.equal(track.times, scheduler.timesteps[begin:])
    assert track.steps == len(track.levels) - 1
    assert track.levels[-1] == 0


@given(st.integers(1, 16384))
def test_shift_is_that_of_diffusers(tokens: int) -> None:
    assert calculate_shift(tokens, SCHEDULER) == pipeline_flux_inpaint.calculate_shift(tokens)


def test_strength_that_leaves_no_step_is_refused_by_name() -> None:
    with pytest.raises(InvalidField) as refused:
        FLOW.track(steps=4, strength=1e-20, cells=16)
    assert refused.value.field == "strength"


@DTYPES
def test_a_mixed_batch_steps_like_one_scheduler_per_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grids = [(4, 1.0, 12), (9, 0.5, 20), (6, 0.8, 7)]
    schedulers = [diffusers_scheduler(SCHEDULER, *spec) for spec in grids]
    latents = [torch.randn(tokens, 8).to(dtype) for _, _, tokens in grids]
    mine = torch.cat(latents)
    lengths = torch.tensor([tokens for _, _, tokens in grids])
    for step in range(4):
        velocity = [torch.randn_like(latent) for latent in latents]
        now, then = (
            torch.stack([s.sigmas[s.begin_index + at] for s in schedulers])
            .repeat_interleave(lengths)
            .unsqueeze(1)
            for at in (step, step + 1)
        )
        mine, remembered = FLOW.step(mine, torch.cat(velocity), (), now, then)
        assert remembered == ()
        latents = [
            s.step(v[None], s.timesteps[s.begin_index + step], x[None], return_dict=False)[0][0]
            for s, v, x in zip(schedulers, velocity, latents, strict=True)
        ]
        assert mine.dtype is dtype
        assert torch.equal(mine, torch.cat(latents))


@DTYPES
def test_noise_is_scaled_like_the_scheduler_does(dtype: torch.dtype) -> None:
    image, noise = torch.randn(2, 12, 8).to(dtype)
    scheduler = diffusers_scheduler(SCHEDULER, 5, 0.7, 12)
    theirs = scheduler.scale_noise(
        image[None], scheduler.timesteps[scheduler.begin_index][None], noise[None]
    )[0]
    assert torch.equal(FLOW.noised(image, noise, scheduler.sigmas[scheduler.begin_index][None]), theirs)


@DTYPES
def test_blend_keeps_the_step_inside_and_the_noised_template_outside(dtype: torch.dtype) -> None:
    latent, image, noise = torch.randn(3, 6, 4).to(dtype)
    mask = torch.tensor([1, 0, 1, 0, 0, 1]).to(dtype)[:, None].expand(6, 4)
    sigma = torch.tensor([0.5] * 3 + [0.0] * 3)[:, None]
    outside = FLOW.noised(image, noise, sigma)
    blended = blend(latent, outside, mask)
    assert torch.equal(blended[[0, 2, 5]], latent[[0, 2, 5]])
    assert torch.equal(blended[1], FLOW.noised(image, noise, sigma[:1])[1])
    assert torch.equal(blended[3:5], image[3:5])


@DTYPES
def test_guidance_combines_as_the_pipeline_writes_it(dtype: torch.dtype) -> None:
    positive, negative = torch.randn(2, 6, 4).to(dtype)
    combined = tiny_flux.family().network.guided(positive, negative, torch.full((6, 1), 2.7))
    assert torch.equal(combined, negative + 2.7 * (positive - negative))
