"""Rows that step by tables end as the Stable Diffusion inpainting pipeline does: begin, blend and draws included.

The pipeline runs with a tiny network. What the network gave in each step is given to the row, so that only sampling is
compared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from giornata.schedulers import SOLVERS
from giornata.wire.models import DISCRETE_TIME, Sampler
from giornata_denoiser.engine.denoise_step import blend
from giornata_denoiser.families.sampling.schedules import DiscreteTime
from giornata_lab.bench.compute.sampled import Latents, Sampled, stepped

CONFIG: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "steps_offset": 1,
}
SIDE = 32
STEPS = 4


@dataclass
class Seen:
    """What the pipeline's parts were given and gave."""

    latents: Tensor = field(default_factory=lambda: torch.empty(0))
    noise: Tensor = field(default_factory=lambda: torch.empty(0))
    picture: Tensor = field(default_factory=lambda: torch.empty(0))
    mask: Tensor = field(default_factory=lambda: torch.empty(0))
    generator: Tensor = field(default_factory=lambda: torch.empty(0))
    outputs: list[Tensor] = field(default_factory=list)
    scaled: list[Tensor] = field(default_factory=list)


@pytest.fixture(scope="module", params=[4, 9], ids=["blended", "conditioned"])
def pipeline(request: pytest.FixtureRequest) -> Any:
    """`StableDiffusionInpaintPipeline` over random weights, without text encoder."""
    torch.manual_seed(0)
    unet: Any = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=request.param, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
    vae: Any = diffusers.AutoencoderKL(
        block_out_channels=(16,) * 4, norm_num_groups=16, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    made: Any = diffusers.StableDiffusionInpaintPipeline(
        vae=vae, unet=unet, scheduler=diffusers.EulerDiscreteScheduler.from_config(CONFIG), text_encoder=None,
        tokenizer=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def run(pipeline: Any, sampler: Sampler, strength: float, patch: pytest.MonkeyPatch) -> tuple[Tensor, Seen]:
    """The pipeline's final latents, (1, 4, height, width), and what was seen on the way."""
    solver, seen = SOLVERS[sampler], Seen()
    scheduler = getattr(diffusers, solver.scheduler).from_config(CONFIG, **solver.options)
    patch.setattr(pipeline, "scheduler", scheduler)
    prepare, prepare_mask, step = pipeline.prepare_latents, pipeline.prepare_mask_latents, scheduler.step

    def spy_latents(*args: Any, return_image_latents: bool, **options: Any) -> Any:
        """The picture is told where it is encoded at all."""
        encoded = return_image_latents or not options["is_strength_max"]
        made = prepare(*args, return_image_latents=encoded, **options)
        seen.latents, seen.noise, seen.picture = made if encoded else (*made, torch.zeros_like(made[0]))
        return made if return_image_latents else made[:2]

    def spy_mask(*args: Any) -> Any:
        mask, masked = prepare_mask(*args)
        seen.mask = mask[:1].expand(1, 4, -1, -1)
        seen.generator = args[7].get_state()
        return mask, masked

    @functools.wraps(step)  # the pipeline asks its signature whether it draws
    def spy_step(output: Tensor, time: Any, sample: Tensor, **options: Any) -> Any:
        seen.outputs.append(output)
        seen.scaled.append(scheduler.scale_model_input(sample, time))
        return step(output, time, sample, **options)

    patch.setattr(pipeline, "prepare_latents", spy_latents)
    patch.setattr(pipeline, "prepare_mask_latents", spy_mask)
    patch.setattr(scheduler, "step", spy_step)
    picture = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, SIDE, SIDE)
    mask[..., 8:24, 0:16] = 1
    embeds = torch.randn(2, 1, 5, 16, generator=torch.Generator().manual_seed(2))
    latents = pipeline(
        prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], image=picture, mask_image=mask, height=SIDE,
        width=SIDE, num_inference_steps=STEPS, strength=strength, guidance_scale=3.0, output_type="latent",
        generator=torch.Generator().manual_seed(5),
    ).images  # fmt: skip
    return latents, seen


@torch.inference_mode()
@pytest.mark.parametrize("sampler", DISCRETE_TIME)
def test_a_row_ends_as_the_pipeline_does(
    pipeline: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full strength where the network sees the mask, and of less where the row is blended."""
    strength = 1.0 if pipeline.unet.config.in_channels == 9 else 0.7
    with monkeypatch.context() as patch:
        wanted, seen = run(pipeline, sampler, strength, patch)
    packs = Latents(torch.float32)
    grid = wanted.shape[2], wanted.shape[3]
    noise, picture, mask = (packs.packed(each[0]) for each in (seen.noise, seen.picture, seen.mask))
    track = SCHEDULE.track(sampler=sampler, steps=STEPS, strength=strength, cells=1)
    assert track.steps == len(seen.outputs)
    row = Sampled(track, grid, track.noised(picture, noise, 0), seen.generator)
    for output, scaled in zip(seen.outputs, seen.scaled, strict=True):
        network_input = row.latent * track.scales[row.step]
        assert_close(network_input, packs.packed(scaled[0]))
        (row,) = stepped([row], [packs.packed(output[0])])
        if pipeline.unet.config.in_channels == 4:
            row = replace(row, latent=blend(row.latent, track.noised(picture, noise, row.step), mask))
    assert_close(row.latent, packs.packed(wanted[0]))


SCHEDULE = DiscreteTime(CONFIG)


def assert_close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)
