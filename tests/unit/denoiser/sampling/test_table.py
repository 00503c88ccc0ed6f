"""A table samples as the scheduler that it was made of, alone and among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from giornata_denoiser.families.sampling.table import solved
from giornata_denoiser.rows.track import NOISE, SamplerTable
from giornata_lab.bench.compute.sampled import Sampled, stepped
from tests.unit.denoiser.sampling.schedulers import CASES, SD, Case, Reference

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
def test_the_outside_is_what_pipelines_blend_in(name: str) -> None:
    """At every level but the last one, where it is the picture itself."""
    picture, noise = pixels((4, 4), 1), pixels((4, 4), 2)
    track, theirs = TRACKS[name], Reference.of(CASES[name], pixels((4, 4), 3), 4)
    for step in range(track.steps):
        assert_close(track.noised(picture, noise, step), theirs.noised(picture, noise))
        theirs.scaled  # noqa: B018 - some schedulers want it called before each step
        theirs.advance(pixels((4, 4), step))
    assert torch.equal(track.noised(picture, noise, track.steps), picture)


@cases
def test_a_step_predicts_the_picture_that_its_output_was_made_of(name: str) -> None:
    """From the true noise, velocity or picture, at any level, the end is the picture."""
    picture, noise = pixels((4, 4), 1), pixels((4, 4), 2)
    track = TRACKS[name]
    prediction = CASES[name].kind(**CASES[name].options).config.get("prediction_type", "flow_prediction")
    for step in range(track.steps):
        of_picture, of_noise = track.outside[step].tolist()
        length = (of_picture**2 + of_noise**2) ** 0.5
        output = {
            "epsilon": noise,
            "v_prediction": (of_picture * noise - of_noise * picture) / length,
            "flow_prediction": noise - picture,
        }[prediction]
        ended = track.predicted(track.noised(picture, noise, step), output, step)
        assert_close(ended, picture, 3e-5)  # a fourteenth of the picture is left at the noisiest levels


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


@cases
def test_a_sampler_has_few_states_and_draws_only_where_it_adds_noise(name: str) -> None:
    track = TRACKS[name]
    assert track.matrices.shape == (track.steps, 1 + track.remembered, 3 + track.remembered)
    assert track.remembered <= 4
    assert any(track.draws) is name.startswith(("Euler anc", "SDE", "LCM", "DDPM"))
    assert not track.draws[-1]
    if name.startswith(("Euler", "DDIM", "flow", "LCM", "DDPM")):
        assert track.remembered == 0
    if not any(track.draws):
        assert not track.matrices[:, :, NOISE].any()


def test_a_scheduler_that_clips_is_not_linear() -> None:
    case = Case(CASES["DDIM"].kind, {**SD, "clip_sample": True, "clip_sample_range": 1e-3})
    scheduler, first = case.ready()
    with pytest.raises(ValueError, match="DDIMScheduler is not linear in step 1"):
        solved(scheduler, first, levels=torch.zeros(13), prediction="epsilon")
