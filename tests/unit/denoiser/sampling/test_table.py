"""Tables sample as the schedulers that they were made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_inpaint
from diffusers.pipelines.flux2 import pipeline_flux2_klein_inpaint
from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3_inpaint
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.component_configs import SOLVERS
from giornata.wire.errors import InvalidField
from giornata.wire.models import DISCRETE_TIME, WITH_LIGHTNING, Sampler, evaluations
from giornata_denoiser.families.sampling import (
    DiscreteTime,
    FlowMatching,
    calculate_shift,
    compute_empirical_mu,
    discrete_scheduler_config,
    shifted_always,
    shifted_by_size,
    shifted_by_steps,
    solve_track,
)
from giornata_denoiser.rows.row import NOISE, SamplerTable
from giornata_lab.bench.compute.tiny_flux import SCHEDULER
from tests.unit.denoiser.sampling.sampled import CASES, SD, Case, Reference, Sampled, stepped

# A table samples as the scheduler that it was made of, alone and among others.


CLOSE = 1e-6
"""Relative to the largest number."""
TRACKS: dict[str, SamplerTable] = {name: case.track() for name, case in CASES.items()}
cases = pytest.mark.parametrize("name", CASES)


def pixels(grid: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(1, 4, *grid, generator=torch.Generator().manual_seed(seed))


def tokens(of: Tensor) -> Tensor:
    return of[0].flatten(1).T.contiguous()


def assert_close(mine: Tensor, theirs: Tensor, relative: float = CLOSE) -> None:
    torch.testing.assert_close(mine, theirs, atol=relative * float(theirs.abs().max()), rtol=0)


def pair(name: str, grid: tuple[int, int], seed: int, dtype: torch.dtype) -> tuple[Sampled, Reference]:
    """The same picture, to be sampled by table and by scheduler."""
    begin = pixels(grid, seed).to(dtype)
    theirs = Reference.of(CASES[name], begin, seed)
    return Sampled(TRACKS[name], grid, tokens(begin), theirs.generator.get_state()), theirs


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, CLOSE), (torch.bfloat16, 0.06)])
def test_every_scheduler_in_one_batch_samples_as_it_does_alone(dtype: torch.dtype, relative: float) -> None:
    """Random outputs, pictures of different sizes; noise is drawn from the generator that the scheduler draws from."""
    pairs = [pair(name, (3 + index % 4, 5), seed=index, dtype=dtype) for index, name in enumerate(TRACKS)]
    while running := [(index, mine, theirs) for index, (mine, theirs) in enumerate(pairs) if not mine.done]:
        outputs = [pixels(mine.grid, 1000 * index + mine.step).to(dtype) for index, mine, _ in running]
        for (_, mine, theirs), output in zip(running, outputs, strict=True):
            if dtype is torch.float32:
                assert_close(mine.latent * mine.track.scales[mine.step], tokens(theirs.scaled))
            theirs.scaled  # noqa: B018 - some schedulers want it called before each step
            theirs.advance(output)
        after = stepped([mine for _, mine, _ in running], [tokens(output) for output in outputs])
        for (index, _, theirs), mine in zip(running, after, strict=True):
            assert mine.latent.dtype is dtype
            assert_close(mine.latent.float(), tokens(theirs.latent).float(), relative)
            pairs[index] = mine, theirs
    assert [mine.step for mine, _ in pairs] == [len(theirs.times) for _, theirs in pairs]


@cases
def test_the_outside_is_what_pipelines_blend_in_and_its_noise_leads_back(name: str) -> None:
    """At every level but the last one, where it is the picture itself.

    From the true noise or velocity, at any level, the predicted end is the picture.
    """
    picture, noise = pixels((4, 4), 1), pixels((4, 4), 2)
    track, theirs = TRACKS[name], Reference.of(CASES[name], pixels((4, 4), 3), 4)
    prediction = CASES[name].kind(**CASES[name].options).config.get("prediction_type", "flow_prediction")
    for step in range(track.steps):
        outside = track.noised(picture, noise, step)
        assert_close(outside, theirs.noised(picture, noise))
        theirs.scaled  # noqa: B018 - some schedulers want it called before each step
        theirs.advance(pixels((4, 4), step))
        of_picture, of_noise = track.outside[step].tolist()
        length = (of_picture**2 + of_noise**2) ** 0.5
        output = {
            "epsilon": noise,
            "v_prediction": (of_picture * noise - of_noise * picture) / length,
            "flow_prediction": noise - picture,
        }[prediction]
        ended = track.predicted(outside, output, step)
        assert_close(ended, picture, 3e-5)  # a fourteenth of the picture is left at the noisiest levels
    assert torch.equal(track.noised(picture, noise, track.steps), picture)


@cases
def test_a_region_steps_as_the_whole_picture_does_there(name: str) -> None:
    grid, region = (4, 5), torch.tensor([1, 7, 8, 19])
    whole, _ = pair(name, grid, 5, torch.float32)
    part = whole
    for step in range(whole.track.steps):
        output = tokens(pixels(grid, step))
        (whole,) = stepped([whole], [output])
        (made,) = stepped([part], [output[region]], region)
        assert_close(made.latent, whole.latent[region])
        memory = None
        if made.memory is not None and whole.memory is not None:
            memory = torch.zeros_like(whole.memory)
            memory[:, region] = made.memory
        part = Sampled(part.track, grid, whole.latent, made.generator, made.step, memory)


def test_a_sampler_has_few_states_and_draws_only_where_it_adds_noise() -> None:
    for name, track in TRACKS.items():
        assert track.matrices.shape == (track.steps, 1 + track.remembered, 3 + track.remembered), name
        assert track.remembered <= 4, name
        assert any(track.draws) is name.startswith(("Euler anc", "SDE", "LCM", "DDPM")), name
        assert not track.draws[-1], name
        assert not (name.startswith(("Euler", "DDIM", "flow", "LCM", "DDPM")) and track.remembered), name
        assert any(track.draws) or not track.matrices[:, :, NOISE].any(), name


def test_a_scheduler_that_clips_is_not_linear() -> None:
    case = Case(CASES["DDIM"].kind, {**SD, "clip_sample": True, "clip_sample_range": 1e-3})
    scheduler, first = case.ready()
    with pytest.raises(ValueError, match="DDIMScheduler is not linear in step 1"):
        solve_track(scheduler, first, levels=torch.zeros(13), prediction="epsilon")


# Models with discrete times: what a checkpoint's scheduler offers, where rows begin, and what is refused.


PIPELINES = (diffusers.StableDiffusionInpaintPipeline, diffusers.StableDiffusionXLInpaintPipeline)
samplers = pytest.mark.parametrize("sampler", DISCRETE_TIME)


def config(name: str = "EulerDiscreteScheduler", **options: Any) -> dict[str, Any]:
    return {"_class_name": name, **SD, **options}


@cache
def schedule(prediction: str = "epsilon") -> DiscreteTime:
    return DiscreteTime(config(prediction_type=prediction))


@pytest.mark.parametrize(("kind", "strength"), [(PIPELINES[0], 1.0), (PIPELINES[1], 0.6)])
@samplers
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
    read = discrete_scheduler_config(tmp_path)
    assert (read["_class_name"], read["solver_order"]) == ("UniPCMultistepScheduler", 3)
    assert DiscreteTime(read).default_sampler is Sampler.UNIPC


def test_equal_rows_share_a_track() -> None:
    tracks = [schedule().track(sampler=Sampler.UNIPC, steps=9, strength=0.5, cells=n) for n in (1, 2)]
    assert tracks[0] is tracks[1]
    assert set(schedule().samplers) == set(DISCRETE_TIME) == set(SOLVERS)


# Grids and steps of flow matching equal diffusers' scheduler and pipelines bit for bit.


FLOW = FlowMatching(SCHEDULER, shifted_by_size)
SHIFTED = {**SCHEDULER, "use_dynamic_shifting": False}
GRIDS = pytest.mark.parametrize(
    ("steps", "strength", "tokens"), [(4, 1.0, 12), (28, 0.6, 4096), (50, 0.01, 1024)]
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


def sd3_scheduler(config: dict[str, Any], steps: int, strength: float, tokens: int) -> Any:
    by_size = {"mu": calculate_shift(tokens, config)} if config["use_dynamic_shifting"] else {}
    pipeline = "StableDiffusion3InpaintPipeline"
    return begun(
        pipeline_stable_diffusion_3_inpaint, pipeline, config, strength, num_inference_steps=steps, **by_size
    )


def assert_same_grid(mine: SamplerTable, scheduler: Any) -> None:
    begin = scheduler.begin_index
    assert torch.equal(mine.levels, scheduler.sigmas[begin:])
    assert torch.equal(mine.times, scheduler.timesteps[begin:])
    assert torch.equal(mine.matrices[:, 0], torch.stack(
        (torch.zeros(mine.steps), scheduler.sigmas[begin:].diff(), torch.ones(mine.steps)), dim=1
    ))  # fmt: skip
    assert mine.levels[-1] == 0


@GRIDS
def test_grids_are_those_of_the_pipelines(steps: int, strength: float, tokens: int) -> None:
    for config in (SCHEDULER, SHIFTED):
        mine = track(steps, strength, tokens, FlowMatching(config, shifted_by_size))
        assert_same_grid(mine, flux_scheduler(config, steps, strength, tokens))
    for config in (SHIFTED, SCHEDULER):
        mine = track(steps, strength, tokens, FlowMatching(config, shifted_always))
        assert_same_grid(mine, sd3_scheduler(config, steps, strength, tokens))
    mu = pipeline_flux2_klein_inpaint.compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    theirs = begun(
        pipeline_flux2_klein_inpaint, "Flux2KleinInpaintPipeline", SCHEDULER, strength,
        sigmas=even(steps), mu=mu,
    )  # fmt: skip
    assert_same_grid(track(steps, strength, tokens, FlowMatching(SCHEDULER, shifted_by_steps)), theirs)


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


def test_a_row_of_one_state_steps_alike_beside_rows_with_memory() -> None:
    row = Sampled(track(4, 1.0, 12), (3, 4), torch.randn(12, 8))
    matrices = torch.randn(4, 2, 4)
    matrices[:, :, 0] = 0
    other = replace(row, track=replace(row.track, matrices=matrices))
    outputs = [torch.randn(12, 8)] * 2
    assert torch.equal(stepped([row, other], outputs)[0].latent, stepped([row], outputs[:1])[0].latent)
