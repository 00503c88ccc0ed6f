"""A family of its own, as proof that one folder and one table entry make a family.

It is Flux with one more conditioning channel, a depth map, and a solver that remembers its last velocity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.wire.models import Sampler
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.sampling.schedules import FlowMatching, flow_scheduler_config, shifted_by_size
from giornata_denoiser.rows.row import NOISE, OUTPUT, STATES, SamplerTable
from giornata_lab.bench.compute import tiny_flux

LATENT: Final = tiny_flux.LATENT
ADDED: Final = 0.1
"""Noise of the ancestral sampler."""


class DepthFlux(FluxInpaint):
    """Flux inpainting whose tokens carry their depth behind the latent."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        return {**super().conditioning, "depth": 1}

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return torch.cat((latents, torch.cat([one["depth"] for one in conditioning])), dim=1)


class TwoStep:
    """Adams-Bashforth of order two along the flow of `FlowMatching`; the first step is Euler's.

    Its ancestral sampler adds noise to that, in every step but the last.
    """

    samplers: Final = (Sampler.DEIS, Sampler.EULER_ANCESTRAL)
    default_sampler: Final = Sampler.DEIS
    recorder: Final = Sampler.DEIS

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._flow = FlowMatching(config, shifted_by_size)

    def track(self, *, sampler: Sampler, steps: int, strength: float, cells: int) -> SamplerTable:
        track = self._flow.track(sampler=Sampler.EULER, steps=steps, strength=strength, cells=cells)
        lengths = track.levels.diff()
        ahead = torch.zeros_like(lengths)
        ahead[1:] = lengths[1:] / (2 * lengths[:-1])
        matrices = torch.zeros(track.steps, 2, 4)
        matrices[:, 0, OUTPUT] = lengths * (1 + ahead)
        matrices[:, 0, STATES] = 1.0
        matrices[:, 0, STATES + 1] = -lengths * ahead
        matrices[:, 1, OUTPUT] = 1.0
        if sampler.stochastic:
            matrices[:-1, 0, NOISE] = ADDED
        return replace(track, matrices=matrices)


def load_toy(folder: Path, dtype: torch.dtype, device: torch.device, _: WeightQuantization) -> ModelFamily:
    """The table's entry: the folder's scheduler, and random weights of the toy's own shape."""
    torch.manual_seed(0)
    kind: Any = FluxTransformer2DModel
    config = FluxTransformer2DModel.load_config(folder, subfolder="transformer")
    transformer = kind.from_config({**config, "in_channels": LATENT + 1, "out_channels": LATENT})
    network = DepthFlux(transformer.to(device, dtype).eval().requires_grad_(requires_grad=False))
    return ModelFamily(network.text, TwoStep(flow_scheduler_config(folder)), network)
