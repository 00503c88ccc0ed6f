"""Tensors in blobs, and latents in front of an autoencoder. Imports torch, so only services that compute import it.

Named tensors travel as safetensors bytes. Between an autoencoder of diffusers and the network that denoises its latents
lies a normalisation: prepost encodes and decodes with it, the denoiser fits its preview map with it. Latents are
(1, channels, height, width) throughout, as the network sees them: those of a video autoencoder without their single
frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from giornata.wire.errors import InputLost

EMBEDS: Final = "prompt_embeds"
POOLED: Final = "pooled_prompt_embeds"
SIZES: Final = "add_time_ids"
"""Names of a text encoding's tensors: (text_tokens, channels); of some (channels,), and of SDXL (6,) sizes."""
PROMPT_MASK: Final = "prompt_attention_mask"
"""Name of a text encoding's tensor (text_tokens,): 1 for tokens of the prompt, 0 for those that pad it. Optional."""

NEGATIVE: Final = "negative_"
"""Begins the names of a text encoding's tensors that are of the negative prompt."""


def padding_tokens(mask: torch.Tensor | None) -> int:
    """Return how many of a text's last tokens are padding by its :data:`PROMPT_MASK`; one token at least is none."""
    if mask is None:
        return 0
    live = mask.nonzero()
    last = int(live[-1]) if len(live) else 0
    return len(mask) - 1 - last


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """`tensors` on the CPU, contiguous, with their dtypes, as safetensors bytes."""
    return safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    )


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in `data`, on the CPU; InputLost if the bytes are not whole safetensors."""
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise InputLost("A blob does not hold tensors.", received=f"{len(data)} bytes") from error


KLEIN_PATCH: Final = 2
"""Latent pixels a side of a patch that `AutoencoderKLFlux2` normalises."""


@dataclass(frozen=True)
class LatentNormalisation:
    """The normalisation between an autoencoder's own latents and those of the network."""

    posterior: Callable[[Any, Tensor], Any]
    """What the autoencoder's `encode` returns for (1, 3, height, width) pixels in -1..1."""
    normalised: Callable[[Any, Tensor], Tensor]
    """A sample of the posterior, as the network sees it."""
    decoded: Callable[[Any, Tensor], Tensor]
    """(1, 3, height, width) pixels of the network's latents."""


def normalisation_of(autoencoder: Any) -> LatentNormalisation:
    """The normalisation of a diffusers autoencoder, by its class.

    Raises:
        ValueError: the autoencoder is of another class than those of :data:`NORMALISATIONS`.
    """
    name = type(autoencoder).__name__
    if name not in NORMALISATIONS:
        raise ValueError(f"the autoencoder is a {name}; served are {', '.join(NORMALISATIONS)}")
    return NORMALISATIONS[name]


def _encode(autoencoder: Any, pixels: Tensor) -> Any:
    return autoencoder.encode(pixels)


def _shifted_and_scaled(autoencoder: Any, sample: Tensor) -> Tensor:
    config = autoencoder.config
    normalised: Tensor = (sample - (config.shift_factor or 0.0)) * config.scaling_factor
    return normalised


def _decode_shifted_and_scaled(autoencoder: Any, latents: Tensor) -> Tensor:
    config = autoencoder.config
    latents = latents / config.scaling_factor + (config.shift_factor or 0.0)
    return _decode(autoencoder, latents)


def _encode_frame(autoencoder: Any, pixels: Tensor) -> Any:
    return autoencoder.encode(pixels.unsqueeze(2))


def _by_channel(autoencoder: Any, sample: Tensor) -> Tensor:
    mean, inverse = _statistics(autoencoder, sample)
    normalised: Tensor = (sample - mean) * inverse
    return normalised.squeeze(2)


def _decode_by_channel(autoencoder: Any, latents: Tensor) -> Tensor:
    frame = latents.unsqueeze(2)
    mean, inverse = _statistics(autoencoder, frame)
    return _decode(autoencoder, frame / inverse + mean)[:, :, 0]


def _statistics(autoencoder: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Means and inverse deviations (1, channels, 1, 1, 1), in the order of roundings of `QwenImageInpaintPipeline`."""
    config = autoencoder.config
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
    )
    return mean.to(like.device, like.dtype), 1.0 / deviation.to(like.device, like.dtype)


def _encode_opaque(autoencoder: Any, pixels: Tensor) -> Any:
    """The autoencoder sees transparency, which pictures here do not have."""
    return _encode_frame(autoencoder, torch.cat((pixels, torch.ones_like(pixels[:, :1])), dim=1))


def _decode_on_white(autoencoder: Any, latents: Tensor) -> Tensor:
    """Transparent pixels are seen on white, as the pipeline shows them to its text encoder."""
    decoded = _decode_by_channel(autoencoder, latents)
    opacity = (decoded[:, 3:] + 1) / 2
    return decoded[:, :3] * opacity + (1 - opacity)


def _by_patch(autoencoder: Any, sample: Tensor) -> Tensor:
    mean, deviation = _batch_norm(autoencoder, sample)
    return pixel_shuffle((pixel_unshuffle(sample, KLEIN_PATCH) - mean) / deviation, KLEIN_PATCH)


def _decode_by_patch(autoencoder: Any, latents: Tensor) -> Tensor:
    mean, deviation = _batch_norm(autoencoder, latents)
    patches = pixel_unshuffle(latents, KLEIN_PATCH) * deviation + mean
    return _decode(autoencoder, pixel_shuffle(patches, KLEIN_PATCH))


def _batch_norm(autoencoder: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Running mean and deviation of a patch's channels, (1, 4 * channels, 1, 1)."""
    statistics = autoencoder.bn
    mean = statistics.running_mean.view(1, -1, 1, 1).to(like.device, like.dtype)
    variance = statistics.running_var.view(1, -1, 1, 1) + autoencoder.config.batch_norm_eps
    return mean, torch.sqrt(variance).to(like.device, like.dtype)


def _decode(autoencoder: Any, latents: Tensor) -> Tensor:
    pixels: Tensor = autoencoder.decode(latents, return_dict=False)[0]
    return pixels


NORMALISATIONS: Final = {
    "AutoencoderKL": LatentNormalisation(_encode, _shifted_and_scaled, _decode_shifted_and_scaled),
    "AutoencoderKLQwenImage": LatentNormalisation(_encode_frame, _by_channel, _decode_by_channel),
    "AutoencoderKLQwenImage21": LatentNormalisation(_encode_opaque, _by_channel, _decode_on_white),
    "AutoencoderKLFlux2": LatentNormalisation(_encode, _by_patch, _decode_by_patch),
}
"""By the class of the autoencoder: shift and scale; statistics by channel, twice; batch norm by 2x2 patches."""
