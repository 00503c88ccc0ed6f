"""A family of its own, as proof that one folder and one table entry make a family.

It is Flux with one more conditioning channel, a depth map, and a solver that remembers its last velocity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata_denoiser.families.flux.checkpoints import FluxInpaint
from giornata_denoiser.families.flux.schedule import FlowMatching, scheduler_config
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Track
from tests.fakes import tiny_flux

LATENT: Final = tiny_flux.LATENT


class DepthFlux(FluxInpaint):
    """Flux inpainting whose tokens carry their depth behind the latent."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        return {**super().conditioning, "depth": 1}

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return torch.cat((latents, torch.cat([one["depth"] for one in conditioning])), dim=1)


class TwoStep:
    """Adams-Bashforth of order two along the flow of `FlowMatching`; the first step is Euler's.

    Numbers: sigma, and how much of the change since the last velocity is added to the velocity.
    """

    memory: Final = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._flow = FlowMatching(config)

    def track(self, *, steps: int, strength: float, cells: int) -> Track:
        track = self._flow.track(steps=steps, strength=strength, cells=cells)
        lengths = track.levels.diff()
        ahead = torch.zeros_like(track.levels)
        ahead[1:-1] = lengths[1:] / (2 * lengths[:-1])
        return Track(track.times, track.levels, torch.stack((track.levels, ahead), dim=1))

    def scaled(self, latent: Tensor, now: Tensor) -> Tensor:
        return self._flow.scaled(latent, now)

    def step(
        self, latent: Tensor, output: Tensor, memory: tuple[Tensor, ...], now: Tensor, then: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (last,) = memory
        velocity = output + now[:, 1:] * (output - last)
        return latent + (then - now)[:, :1] * velocity, (output,)

    def initial(self, noise: Tensor, at: Tensor) -> Tensor:
        return self._flow.initial(noise, at[:1])

    def noised(self, picture: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        return self._flow.noised(picture, noise, at[:1])

    def clean(self, latent: Tensor, output: Tensor, now: Tensor) -> Tensor:
        return self._flow.clean(latent, output, now[:1])


def load_toy(folder: Path, dtype: torch.dtype, device: torch.device) -> ModelFamily:
    """The table's entry: the folder's scheduler, and random weights of the toy's own shape."""
    torch.manual_seed(0)
    kind: Any = FluxTransformer2DModel
    config = FluxTransformer2DModel.load_config(folder, subfolder="transformer")
    transformer = kind.from_config({**config, "in_channels": LATENT + 1, "out_channels": LATENT})
    network = DepthFlux(transformer.to(device, dtype).eval().requires_grad_(requires_grad=False))
    return ModelFamily(network.text, TwoStep(scheduler_config(folder)), network)
