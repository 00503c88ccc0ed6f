"""The rehearsal, and the map from latents to colours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from giornata.tensors import NORMALISATIONS, normalisation_of
from giornata.wire.errors import Failed, RowPoisoned
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.preview_map import PreviewMap, board, fit_map, fit_model
from giornata_denoiser.startup import rehearse
from giornata_lab.bench.compute import tiny_flux
from tests.fakes.fleet import CARD

# The rehearsal: a model that computes passes, one that does not never serves.


PREVIEW_MAP = PreviewMap(torch.zeros(16, 3), torch.zeros(3))


@pytest.mark.parametrize("fill", [False, True])
def test_a_model_that_computes_passes(fill: bool) -> None:
    rehearse(Checkpoint(CARD, tiny_flux.family(fill=fill), PREVIEW_MAP))


def test_a_model_whose_results_are_not_finite_is_refused() -> None:
    network = FluxInpaint(tiny_flux.transformer())
    network.transformer.proj_out.weight[0, 0] = torch.nan
    with pytest.raises(Failed, match="cannot compute a picture") as caught:
        rehearse(Checkpoint(CARD, tiny_flux.family(network), PREVIEW_MAP))
    assert isinstance(caught.value.__cause__, RowPoisoned)


# The map from latents to colours: fitted to any autoencoder.


KL = NORMALISATIONS["AutoencoderKL"]


class LinearAutoencoder:
    """Its latents are a linear image of the mean colours; otherwise as diffusers' `AutoencoderKL`."""

    device = torch.device("cpu")

    def __init__(self, channels: int, shift: float | None, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(channels)
        self.mix = torch.randn(3, channels, generator=generator)
        self.offset = torch.randn(channels, generator=generator)
        self.noise = noise
        self.config = SimpleNamespace(shift_factor=shift, scaling_factor=0.36)

    def encode(self, picture: Tensor) -> SimpleNamespace:
        small = adaptive_avg_pool2d(picture, (picture.shape[-2] // 8, picture.shape[-1] // 8))
        latents = torch.einsum("bchw,cd->bdhw", small, self.mix) + self.offset[:, None, None]
        latents = latents + self.noise * torch.randn(
            latents.shape, generator=torch.Generator().manual_seed(9)
        )
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    def seen(self, picture: Tensor) -> Tensor:
        """Latents as the transformer has them, (channels, height, width)."""
        latents: Tensor = self.encode(2 * picture - 1).latent_dist.mode()[0]
        shifted: Tensor = (latents - (self.config.shift_factor or 0)) * self.config.scaling_factor
        return shifted


class LinearVideoAutoencoder(LinearAutoencoder):
    """As `AutoencoderKLQwenImage`: pictures are films of one frame, and statistics are by channel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, None)
        numbers = torch.arange(channels)
        self.config = SimpleNamespace(
            latents_mean=(0.1 * numbers).tolist(), latents_std=(1 + numbers).tolist()
        )

    def encode(self, picture: Tensor) -> SimpleNamespace:
        latents = super().encode(picture.squeeze(2)).latent_dist.mode().unsqueeze(2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    def seen(self, picture: Tensor) -> Tensor:
        latents = self.encode((2 * picture - 1).unsqueeze(2)).latent_dist.mode()[0, :, 0]
        mean, deviation = torch.tensor(self.config.latents_mean), torch.tensor(self.config.latents_std)
        seen: Tensor = (latents - mean[:, None, None]) / deviation[:, None, None]
        return seen


class LinearPatchAutoencoder(LinearAutoencoder):
    """As `AutoencoderKLFlux2`: a batch norm of patches, whose four pixels have equal statistics here."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, None)
        mean, variance = 0.1 * torch.arange(channels), 1.0 + torch.arange(channels)
        self.bn = SimpleNamespace(
            running_mean=mean.repeat_interleave(4), running_var=variance.repeat_interleave(4)
        )
        self.config = SimpleNamespace(batch_norm_eps=1e-4)

    def seen(self, picture: Tensor) -> Tensor:
        latents = self.encode(2 * picture - 1).latent_dist.mode()[0]
        mean, variance = self.bn.running_mean[::4], self.bn.running_var[::4] + self.config.batch_norm_eps
        seen: Tensor = (latents - mean[:, None, None]) / variance.sqrt()[:, None, None]
        return seen


def test_an_autoencoder_that_is_not_served_is_named() -> None:
    with pytest.raises(ValueError, match="LinearAutoencoder; served are AutoencoderKL, "):
        normalisation_of(LinearAutoencoder(3, None))


@pytest.mark.parametrize(
    ("autoencoder", "kind"),
    [
        (LinearAutoencoder(3, 0.1159), "AutoencoderKL"),
        (LinearAutoencoder(4, None), "AutoencoderKL"),
        (LinearVideoAutoencoder(6), "AutoencoderKLQwenImage"),
        (LinearPatchAutoencoder(5), "AutoencoderKLFlux2"),
        (LinearAutoencoder(16, 0.1159), "AutoencoderKL"),
    ],
    ids=["fewest channels", "no shift", "by channel", "by patch", "most channels"],
)
def test_a_linear_autoencoder_is_inverted(autoencoder: LinearAutoencoder, kind: str) -> None:
    picture = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    expected = adaptive_avg_pool2d(picture, (8, 12))[0].permute(1, 2, 0)
    found = fit_model(autoencoder, NORMALISATIONS[kind])(autoencoder.seen(picture)).float() / 255
    assert (found - expected).abs().max() < 0.01


def test_noise_in_the_latents_averages_out() -> None:
    autoencoder = LinearAutoencoder(16, 0.1, noise=0.2)
    picture = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    expected = adaptive_avg_pool2d(picture, (8, 12))[0].permute(1, 2, 0)
    found = fit_model(autoencoder, KL)(autoencoder.seen(picture)).float() / 255
    assert (found - expected).square().mean().sqrt() < 0.08


@given(st.integers(1, 20), st.integers(2, 60), st.integers(0, 2**31))
def test_a_fit_is_never_worse_than_the_mean_colour(channels: int, samples: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    latents, colours = (
        torch.randn(samples, channels, generator=generator),
        torch.rand(samples, 3, generator=generator),
    )
    seen = fit_map(latents, colours)
    error = (latents @ seen.weight + seen.bias - colours).square().mean()
    assert error <= (colours - colours.mean(0)).square().mean() + 1e-6


def test_latents_that_never_change_show_the_mean_colour() -> None:
    colours = torch.tensor([[0.0, 0.2, 1.0], [1.0, 0.2, 0.0]])
    seen = fit_map(torch.ones(2, 4), colours)
    assert torch.equal(seen(torch.ones(4, 1, 1)), torch.tensor([[[128, 51, 128]]], dtype=torch.uint8))


def test_colours_beyond_the_ends_and_no_numbers_are_colours_all_the_same() -> None:
    seen = PreviewMap(torch.eye(3), torch.zeros(3))
    latents = torch.tensor([[-5.0, 7.0, 0.2], [float("nan")] * 3]).T.view(3, 1, 2)
    assert seen(latents).tolist() == [[[0, 255, 51], [0, 0, 0]]]


def test_an_autoencoder_that_does_not_compute_is_refused() -> None:
    autoencoder = LinearAutoencoder(4, 0.0)
    autoencoder.offset = torch.full((4,), float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        fit_model(autoencoder, KL)


def test_the_board_has_every_kind_of_patch() -> None:
    picture = board()
    assert picture.shape == (1, 3, 512, 512)
    assert picture.min() == 0
    assert picture.max() == 1
    flat = picture[0, :, :256, :256].unfold(1, 32, 32).unfold(2, 32, 32)
    assert flat.flatten(3).std(3).max() == 0
    assert len({tuple(colour) for colour in flat[..., 0, 0].flatten(1).T.tolist()}) == 64
    assert torch.equal(picture, board())
