"""Models with discrete times: what a checkpoint's scheduler offers, where rows begin, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.schedulers import SOLVERS
from giornata.wire.errors import InvalidField
from giornata.wire.samplers import DISCRETE_TIME, Sampler, evaluations
from giornata_denoiser.families.sampling.discrete_time import DiscreteTime, scheduler_config
from tests.unit.denoiser.sampling.schedulers import SD

PIPELINES = (diffusers.StableDiffusionInpaintPipeline, diffusers.StableDiffusionXLInpaintPipeline)
samplers = pytest.mark.parametrize("sampler", DISCRETE_TIME)


def config(name: str = "EulerDiscreteScheduler", **options: Any) -> dict[str, Any]:
    return {"_class_name": name, **SD, **options}


@cache
def schedule(prediction: str = "epsilon") -> DiscreteTime:
    return DiscreteTime(config(prediction_type=prediction))


@samplers
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("kind", PIPELINES)
def test_a_track_is_the_pipelines(kind: Any, strength: float, sampler: Sampler) -> None:
    """Its timesteps from `get_timesteps`, its begin from `prepare_latents`."""
    solver, steps = SOLVERS[sampler], 7
    pipeline: Any = kind.__new__(kind)
    scheduler = getattr(diffusers, solver.scheduler).from_config(
        {"clip_sample": False, **SD}, **solver.options
    )
    object.__setattr__(pipeline, "scheduler", scheduler)
    object.__setattr__(pipeline, "vae_scale_factor", 8)
    scheduler.set_timesteps(steps)
    times, _ = pipeline.get_timesteps(steps, strength, "cpu")
    track = schedule().track(sampler=sampler, steps=steps, strength=strength, cells=1)
    assert torch.equal(track.times, times.float())
    assert track.steps == evaluations(sampler, steps, strength, keeps_whole_steps=True)
    picture = torch.randn(1, 4, 2, 3)
    begin, noise = pipeline.prepare_latents(
        1, 4, 16, 24, torch.float32, "cpu", torch.Generator().manual_seed(0),
        image=picture, timestep=times[:1], is_strength_max=strength == 1.0, return_noise=True,
    )  # fmt: skip
    torch.testing.assert_close(track.noised(picture, noise, 0), begin, atol=1e-5, rtol=1e-5)


@given(
    sampler=st.sampled_from(DISCRETE_TIME),
    steps=st.integers(1, 30),
    strength=st.floats(0.01, 1),
    prediction=st.sampled_from(["epsilon", "v_prediction"]),
)
def test_a_track_is_as_long_as_it_is_told_and_falls(
    sampler: Sampler, steps: int, strength: float, prediction: str
) -> None:
    told = evaluations(sampler, steps, strength, keeps_whole_steps=True)
    if not told:
        with pytest.raises(InvalidField, match="leaves no step"):
            schedule(prediction).track(sampler=sampler, steps=steps, strength=strength, cells=1)
        return
    track = schedule(prediction).track(sampler=sampler, steps=steps, strength=strength, cells=1)
    assert track.steps == told
    assert (track.levels.diff() <= 0).all()
    assert 0 <= track.levels.min() <= track.levels.max() <= 1
    assert track.levels[-1] == 0
    assert track.remembered <= 4
    assert bool(track.remembered) <= sampler.remembers, "what a latent alone is no state of is known as such"
    assert all(table.isfinite().all() for table in (track.matrices, track.inputs, track.outside, track.clean))
    assert any(track.draws) is (sampler.stochastic and told > 1)


def test_levels_are_the_networks_own_time_whatever_the_scale_of_latents() -> None:
    """Where samplers evaluate at equal times they are at equal levels, and the network sees equal pictures."""
    ddim, euler = (
        schedule().track(sampler=sampler, steps=10, strength=1.0, cells=1)
        for sampler in (Sampler.DDIM, Sampler.EULER)
    )
    tables = [DiscreteTime(config(timestep_spacing="leading")).track(
        sampler=sampler, steps=10, strength=0.5, cells=1
    ) for sampler in (Sampler.DDIM, Sampler.EULER)]  # fmt: skip
    assert ddim.levels[0] < euler.levels[0] < 1
    one, other = tables
    torch.testing.assert_close(one.levels, other.levels)
    seen = [table.outside[:-1] * table.inputs[:, None] for table in tables]
    torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "sampler"),
    [
        ("PNDMScheduler", {"skip_prk_steps": True}, Sampler.PNDM),
        ("EulerAncestralDiscreteScheduler", {}, Sampler.EULER_ANCESTRAL),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, Sampler.DPMPP_2M_KARRAS),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, Sampler.DPMPP_3M),
        ("LCMScheduler", {}, Sampler.LCM),
    ],
)
def test_the_default_is_the_checkpoints_own(name: str, options: dict[str, Any], sampler: Sampler) -> None:
    assert DiscreteTime(config(name, **options)).default_sampler is sampler


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (config("ConsistencyDecoderScheduler"), "ConsistencyDecoderScheduler .* served are: EulerDiscrete"),
        (config("DPMSolverMultistepScheduler", algorithm_type="dpmsolver"), "'algorithm_type': 'dpmsolver'"),
        (config("PNDMScheduler"), "PNDMScheduler with its defaults is not served"),
        (config(thresholding=True), "thresholding is not served: received True"),
        (config("DDIMScheduler", clip_sample=True), "clip_sample is not served: received True"),
        (config("DDPMScheduler", variance_type="learned_range"), "variance_type is not served"),
        (config(prediction_type="sample"), "sample is not served; served are: epsilon, v_prediction"),
    ],
)
def test_what_no_table_stands_for_is_refused_when_it_is_loaded(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiscreteTime(wrong)


def test_more_steps_than_a_sampler_takes_are_refused_by_name() -> None:
    with pytest.raises(InvalidField, match="lcm does not take so many steps") as refused:
        schedule().track(sampler=Sampler.LCM, steps=60, strength=1.0, cells=1)
    told = refused.value
    assert (told.field, told.received, told.accepted) == ("num_inference_steps", "60", "at most 50")


def test_the_configuration_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    diffusers.UniPCMultistepScheduler(**SD, solver_order=3).save_pretrained(tmp_path / "scheduler")
    read = scheduler_config(tmp_path)
    assert (read["_class_name"], read["solver_order"]) == ("UniPCMultistepScheduler", 3)
    assert DiscreteTime(read).default_sampler is Sampler.UNIPC


def test_equal_rows_share_a_track() -> None:
    tracks = [schedule().track(sampler=Sampler.UNIPC, steps=9, strength=0.5, cells=n) for n in (1, 2)]
    assert tracks[0] is tracks[1]
    assert set(schedule().samplers) == set(DISCRETE_TIME) == set(SOLVERS)
