"""Tokens that are patches of latent pixels, and guidance of outputs, beside diffusers' own formulas."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxPipeline
from hypothesis import given
from hypothesis import strategies as st

from giornata_denoiser.families import network
from giornata_denoiser.families.network import PATCH, Network

NETWORK: Any = None
"""Any: these methods are of no instance."""
GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@given(GRIDS, st.integers(1, 4))
def test_latents_are_packed_as_diffusers_packs_them(grid: tuple[int, int], channels: int) -> None:
    height, width = (PATCH * side for side in grid)
    pixels = torch.randn(channels, height, width)
    packed = Network.packed(NETWORK, pixels)
    assert torch.equal(packed, FluxPipeline._pack_latents(pixels[None], 1, channels, height, width)[0])
    assert torch.equal(Network.unpacked(NETWORK, packed, grid), pixels)


@given(GRIDS, st.integers(1, 4))
def test_a_patchs_pixels_and_channels_change_places(grid: tuple[int, int], channels: int) -> None:
    tokens = grid[0] * grid[1]
    by_pixel = torch.randn(tokens, PATCH, PATCH, channels)
    by_channel = network.by_channel(by_pixel.flatten(1))
    assert torch.equal(by_channel.view(tokens, channels, PATCH, -1), by_pixel.movedim(-1, 1))
    assert torch.equal(network.by_pixel(by_channel), by_pixel.flatten(1))


def test_each_tokens_scale_weighs_its_own_outputs() -> None:
    positive, negative = torch.randn(2, 3, 5, dtype=torch.float64)
    scale = torch.tensor([[0.0], [1.0], [4.0]])
    wanted = negative + scale * (positive - negative)
    torch.testing.assert_close(
        Network.guided(NETWORK, positive, negative, scale), wanted, rtol=1e-6, atol=1e-6
    )
    assert Network.guided(NETWORK, positive.bfloat16(), negative.bfloat16(), scale).dtype is torch.bfloat16
    # Z-Image counts from the prompt's own output: a scale of 1 less says the same
    torch.testing.assert_close(
        network.guide_beyond(positive, positive, negative, scale - 1), wanted, rtol=1e-6, atol=1e-6
    )
