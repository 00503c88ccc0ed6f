"""Rows that consist of a sampler alone: 1x1 patches, no network; and the schedulers of diffusers that they follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import diffusers
import numpy as np
import torch
from torch import Tensor

from giornata_denoiser.engine.denoise_step import advance_states, draw_noise
from giornata_denoiser.families.sampling import solve_track
from giornata_denoiser.rows.row import SamplerTable


class Latents:
    """Packs latent pixels as tokens of one pixel."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        return latent.T.reshape(-1, *grid)

    def packed(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1).T


@dataclass(frozen=True)
class Sampled:
    """What of a row its sampler reads."""

    track: SamplerTable
    grid: tuple[int, int]
    latent: Tensor
    generator: Tensor | None = None
    step: int = 0
    memory: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.step >= self.track.steps


def stepped(rows: list[Sampled], outputs: list[Tensor], region: Tensor | None = None) -> list[Sampled]:
    """`rows` after their next step, in one batch; `outputs` are (tokens, channels), of the region if there is one."""
    network: Any = Latents(outputs[0].dtype)
    batch: Any = rows
    lengths = [len(output) for output in outputs]
    assembly: Any = SimpleNamespace(
        computed_lengths=lengths,
        regions=[region] * len(rows),
        matrices=[row.track.matrices for row in rows],
        row_of_computed=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
    )
    drawn = [draw_noise(row, network) for row in batch]
    latents = torch.cat([row.latent if region is None else row.latent[region] for row in rows])
    states = advance_states(assembly, batch, latents, torch.cat(outputs), [each.noise for each in drawn])
    return [
        replace(row, latent=state.latent, memory=state.memory, generator=each.generator, step=row.step + 1)
        for row, state, each in zip(rows, states, drawn, strict=True)
    ]


# Schedulers of diffusers, as checkpoints and people configure them.


SD: Final[dict[str, Any]] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
}
FLOW: Final = diffusers.FlowMatchEulerDiscreteScheduler


@dataclass(frozen=True)
class Case:
    """A scheduler, and the way that is sampled with it."""

    kind: Callable[..., Any]
    options: dict[str, Any]
    steps: int = 12
    strength: float = 1.0

    def ready(self) -> tuple[Any, int]:
        """A fresh scheduler as a pipeline leaves it before its loop, and the index of its first timestep."""
        scheduler = self.kind(**self.options)
        if self.kind is FLOW:
            mu = 0.8 if scheduler.config.use_dynamic_shifting else None
            scheduler.set_timesteps(sigmas=np.linspace(1, 1 / self.steps, self.steps).tolist(), mu=mu)
        else:
            scheduler.set_timesteps(self.steps)
        first = max(self.steps - min(int(self.steps * self.strength), self.steps), 0) * scheduler.order
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(first)
        return scheduler, first

    def track(self) -> SamplerTable:
        scheduler, first = self.ready()
        times = scheduler.timesteps[first:] / 1000
        prediction = scheduler.config.get("prediction_type", "flow_prediction")
        return solve_track(scheduler, first, levels=torch.cat((times, torch.zeros(1))), prediction=prediction)


def _sd(kind: Callable[..., Any], steps: int = 12, strength: float = 1.0, **options: Any) -> Case:
    return Case(kind, {**SD, **options}, steps, strength)


_DPM: Final = diffusers.DPMSolverMultistepScheduler
CASES: Final = {
    "DDIM": _sd(diffusers.DDIMScheduler, clip_sample=False, set_alpha_to_one=False),
    "DDIM, velocity, strength": _sd(
        diffusers.DDIMScheduler, strength=0.6, clip_sample=False, prediction_type="v_prediction"
    ),
    "DDPM": _sd(diffusers.DDPMScheduler, clip_sample=False),
    "PNDM": _sd(diffusers.PNDMScheduler, skip_prk_steps=True),
    "Euler": _sd(diffusers.EulerDiscreteScheduler, timestep_spacing="leading"),
    "Euler, Karras, strength": _sd(diffusers.EulerDiscreteScheduler, strength=0.75, use_karras_sigmas=True),
    "Euler ancestral": _sd(diffusers.EulerAncestralDiscreteScheduler),
    "DPM++ 2M": _sd(_DPM),
    "DPM++ 2M, Karras": _sd(_DPM, steps=8, use_karras_sigmas=True, final_sigmas_type="zero"),
    "DPM++ 2M, flow": Case(
        _DPM, {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    ),
    "DPM++ 3M": _sd(_DPM, steps=16, solver_order=3),
    "SDE-DPM++ 2M": _sd(_DPM, algorithm_type="sde-dpmsolver++"),
    "SDE-DPM++ 2M, Karras": _sd(_DPM, steps=9, algorithm_type="sde-dpmsolver++", use_karras_sigmas=True),
    "UniPC": _sd(diffusers.UniPCMultistepScheduler),
    "UniPC 3, strength": _sd(diffusers.UniPCMultistepScheduler, strength=0.8, solver_order=3),
    "DEIS": _sd(diffusers.DEISMultistepScheduler),
    "Heun": _sd(diffusers.HeunDiscreteScheduler, steps=8),
    "LCM": _sd(diffusers.LCMScheduler, steps=4, clip_sample=False),
    "flow Euler, shifted": Case(FLOW, {"shift": 3.0}),
    "flow Euler, by size": Case(FLOW, {"use_dynamic_shifting": True}, strength=0.5),
}


@dataclass
class Reference:
    """One picture sampled by diffusers: (1, channels, height, width) all along."""

    scheduler: Any
    times: Tensor
    latent: Tensor
    generator: torch.Generator
    step: int = 0

    @classmethod
    def of(cls, case: Case, latent: Tensor, seed: int) -> Reference:
        scheduler, first = case.ready()
        return cls(scheduler, scheduler.timesteps[first:], latent, torch.Generator().manual_seed(seed))

    @property
    def scaled(self) -> Tensor:
        """What the network would see next."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return self.latent
        scaled: Tensor = self.scheduler.scale_model_input(self.latent, self.times[self.step])
        return scaled

    def noised(self, picture: Tensor, noise: Tensor) -> Tensor:
        """The picture as an inpainting pipeline blends it in after the step before."""
        time = self.times[self.step].unsqueeze(0)
        if hasattr(self.scheduler, "scale_noise"):
            scaled: Tensor = self.scheduler.scale_noise(picture, time, noise)
            return scaled
        added: Tensor = self.scheduler.add_noise(picture, noise, time)
        return added

    def advance(self, output: Tensor) -> None:
        drawing = {}
        if "generator" in inspect.signature(self.scheduler.step).parameters:
            drawing["generator"] = self.generator
        time = self.times[self.step]
        self.latent = self.scheduler.step(output, time, self.latent, return_dict=False, **drawing)[0]
        self.step += 1
