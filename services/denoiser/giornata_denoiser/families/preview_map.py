"""The linear map from latents to colours that previews are seen through, fitted to the checkpoint's own autoencoder.

Autoencoders of diffusion models keep the picture's layout: the mean colour under a latent pixel is close to a linear
function of its channels. The published tables of factors belong to one autoencoder each; fitted when a checkpoint is
loaded, the map needs no table, serves any autoencoder, and takes one encoding of a small board.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from giornata.tensors import LatentNormalisation, normalisation_of
from giornata.weight_loading import load_network

SIDE: Final = 256
"""Pixels a side of a quarter of the board."""
RIDGE: Final = 1e-3
"""Weight of the penalty on the map's size, in units of the latents' variance: channels that the board leaves almost
still would get large weights otherwise, and turn a real picture's detail into false colour."""


@dataclass(frozen=True, eq=False)
class PreviewMap:
    """RGB = latent * weight + bias, on the transformer's device."""

    weight: Tensor
    """(latent_channels, 3) float32"""
    bias: Tensor
    """(3,) float32, in 0..1 as the result is."""

    def to(self, device: torch.device) -> Self:
        """The same map on `device`."""
        return type(self)(self.weight.to(device), self.bias.to(device))

    def __call__(self, latents: Tensor) -> Tensor:
        """The picture of (latent_channels, height, width) latents: (height, width, 3) uint8 on their device."""
        colours = latents.float().permute(1, 2, 0) @ self.weight + self.bias
        return (colours.nan_to_num() * 255).round().clamp(0, 255).to(torch.uint8)


def fit_map(latents: Tensor, colours: Tensor) -> PreviewMap:
    """The map that is right on average: ridge regression, its bias free.

    `latents` are (samples, latent_channels), as the transformer sees them: shifted and scaled. `colours` are (samples,
    3) in 0..1, the mean colour of the pixels under each.
    """
    latents, colours = latents.double(), colours.double()
    mean, mean_colour = latents.mean(0), colours.mean(0)
    centred = latents - mean
    gram = centred.T @ centred
    penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    # a vanishing gram matrix, of latents that never change, leaves the mean colour
    weight = torch.linalg.lstsq(gram + penalty, centred.T @ (colours - mean_colour)).solution
    return PreviewMap(weight.float(), (mean_colour - mean @ weight).float())


def board() -> Tensor:
    """The picture that the autoencoder encodes: (1, 3, 512, 512) in 0..1.

    A quarter each of flat colours, gradients, fine and coarse texture: brightness, hue and detail vary apart.
    """
    levels = torch.linspace(0, 1, 4)
    flat = torch.cartesian_prod(levels, levels, levels).T.reshape(3, 8, 8)
    ramp = torch.linspace(0, 1, SIDE)
    across, down = ramp.expand(SIDE, SIDE), ramp.unsqueeze(1).expand(SIDE, SIDE)
    gradients = torch.stack((across, down, 1 - (across + down) / 2))
    generator = torch.Generator().manual_seed(0)
    fine, coarse = (torch.rand(3, cells, cells, generator=generator) for cells in (SIDE // 2, SIDE // 16))
    upper = torch.cat((_squares(flat), gradients), dim=2)
    lower = torch.cat((_squares(fine), _squares(coarse)), dim=2)
    return torch.cat((upper, lower), dim=1).unsqueeze(0)


@torch.inference_mode()
def fit_autoencoder(folder: Path, device: torch.device) -> PreviewMap:
    """The map of the autoencoder in the checkpoint `folder`, which leaves memory again.

    Raises:
        OSError: its weights are missing.
        ValueError: its class is not served, or its latents are not finite numbers on the board.
    """
    from diffusers import AutoModel  # noqa: PLC0415 - loaded with the first checkpoint

    autoencoder = load_network(AutoModel, folder, "vae", dtype=torch.float32)
    fitted = fit_model(autoencoder.to(device).eval(), normalisation_of(autoencoder))
    del autoencoder
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fitted


def fit_model(autoencoder: Any, normalisation: LatentNormalisation) -> PreviewMap:
    """The map of an autoencoder of diffusers in float32, on its device, through its family's `normalisation`.

    Raises:
        ValueError: its latents of the board are not finite.
    """
    picture = board()
    posterior = normalisation.posterior(autoencoder, (2 * picture - 1).to(autoencoder.device))
    latents = normalisation.normalised(autoencoder, posterior.latent_dist.mode()).cpu()
    if not bool(latents.isfinite().all()):
        raise ValueError("the autoencoder's latents are not finite")
    height, width = latents.shape[-2:]
    colours = torch.nn.functional.adaptive_avg_pool2d(picture, (height, width))
    return fit_map(latents[0].flatten(1).T, colours[0].flatten(1).T).to(autoencoder.device)


def _squares(cells: Tensor) -> Tensor:
    """(3, cells, cells) → (3, SIDE, SIDE): every cell a square."""
    times = SIDE // len(cells[0])
    return cells.repeat_interleave(times, 1).repeat_interleave(times, 2)
