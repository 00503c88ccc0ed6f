"""Tokens that are patches of latent pixels, and guidance of outputs, beside diffusers' own formulas."""

from __future__ import annotations

import torch
from diffusers import FluxPipeline
from hypothesis import given
from hypothesis import strategies as st

from giornata_denoiser.families import protocol
from giornata_denoiser.families import tokens as patches

GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@given(GRIDS, st.integers(1, 4))
def test_latents_are_packed_as_diffusers_packs_them(grid: tuple[int, int], channels: int) -> None:
    height, width = (patches.PATCH * side for side in grid)
    pixels = torch.randn(channels, height, width)
    packed = patches.pack_patches(pixels)
    assert torch.equal(packed, FluxPipeline._pack_latents(pixels[None], 1, channels, height, width)[0])
    assert torch.equal(patches.unpack_patches(packed, grid), pixels)


@given(GRIDS, st.integers(1, 4))
def test_a_patchs_pixels_and_channels_change_places(grid: tuple[int, int], channels: int) -> None:
    tokens = grid[0] * grid[1]
    by_pixel = torch.randn(tokens, patches.PATCH, patches.PATCH, channels)
    by_channel = patches.by_channel(by_pixel.flatten(1))
    assert torch.equal(by_channel.view(tokens, channels, patches.PATCH, -1), by_pixel.movedim(-1, 1))
    assert torch.equal(patches.by_pixel(by_channel), by_pixel.flatten(1))


def test_each_tokens_scale_weighs_its_own_outputs() -> None:
    positive, negative = torch.randn(2, 3, 5, dtype=torch.float64)
    scale = torch.tensor([[0.0], [1.0], [4.0]])
    wanted = negative + scale * (positive - negative)
    torch.testing.assert_close(protocol.guide(positive, negative, scale), wanted, rtol=1e-6, atol=1e-6)
    assert protocol.guide(positive.bfloat16(), negative.bfloat16(), scale).dtype is torch.bfloat16
    # Z-Image counts from the prompt's own output: a scale of 1 less says the same
    torch.testing.assert_close(
        protocol.guide_beyond(positive, positive, negative, scale - 1), wanted, rtol=1e-6, atol=1e-6
    )
