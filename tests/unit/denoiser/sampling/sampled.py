"""Rows that consist of a sampler alone: 1x1 patches, no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from giornata_denoiser.engine.denoise_step import advance_states, draw_noise
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
