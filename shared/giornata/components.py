"""What the configurations of a checkpoint's components tell: shapes, and what is not served. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

Config: TypeAlias = Mapping[str, Any]
"""A component's JSON, as diffusers writes it."""

UNSERVED_SAMPLING: Final = ("thresholding", "clip_sample")
"""Options of a scheduler by which a step is no longer linear in latent and output."""


class CheckpointConfigs(NamedTuple):
    """The configurations of one checkpoint."""

    pipeline: Config
    """``model_index.json``."""
    network: Config
    scheduler: Config
    """Empty where the checkpoint has none."""
    autoencoder: Config


Refusal: TypeAlias = Callable[[CheckpointConfigs], str | None]
"""Why a checkpoint is not served, as the end of a sentence; None where it is."""


@dataclass(frozen=True)
class LatentShape:
    """Shape of the latents of an autoencoder."""

    scale_factor: int
    """Pixels a side of a latent pixel."""
    channels: int


def autoencoder_kl(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKL` and `AutoencoderKLFlux2`; KeyError for the configuration of another class."""
    return LatentShape(2 ** (len(autoencoder["block_out_channels"]) - 1), int(autoencoder["latent_channels"]))


def autoencoder_qwen(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKLQwenImage`; KeyError for the configuration of another class."""
    return LatentShape(2 ** len(autoencoder["temperal_downsample"]), int(autoencoder["z_dim"]))


def autoencoder_qwen_21(autoencoder: Config) -> LatentShape:
    """Latents of `AutoencoderKLQwenImage21`; KeyError for the configuration of another class."""
    return LatentShape(int(autoencoder["scale_factor_spatial"]), int(autoencoder["z_dim"]))


def unserved_sampling(configs: CheckpointConfigs) -> str | None:
    """Why the checkpoint's scheduler is not served, as the end of a sentence; None where it is."""
    asked = [option for option in UNSERVED_SAMPLING if configs.scheduler.get(option)]
    return f"its scheduler asks for {' and '.join(asked)}, which is not served" if asked else None


def unserved_qwen_21(configs: CheckpointConfigs) -> str | None:
    """Why a checkpoint of Qwen-Image 2.1 is not served, as :func:`unserved_sampling` says it."""
    if configs.pipeline.get("sample_sigmas") is not None:
        return "its pipeline has sample_sigmas, which fix the noise levels; served are those of any number of steps"
    return unserved_sampling(configs)


def unserved_unet(configs: CheckpointConfigs, levels: int, **options: object) -> str | None:
    """As :func:`unserved_sampling`, of a UNet with at most so many `levels` and with these `options` alone."""
    fixed = {"time_cond_proj_dim": None, "class_embed_type": None, "encoder_hid_dim_type": None} | options
    for name, served in fixed.items():
        if (found := configs.network.get(name)) != served:
            return f"its UNet has {name} {found}; served is {served}"
    if (found_levels := len(configs.network["block_out_channels"])) > levels:
        return f"its UNet has {found_levels} levels; served are {levels} at most"
    return unserved_sampling(configs)


def unserved_sd(configs: CheckpointConfigs) -> str | None:
    """Why a checkpoint of Stable Diffusion 1 or 2 is not served, as :func:`unserved_sampling` says it."""
    return unserved_unet(configs, 4, addition_embed_type=None)


def unserved_sdxl(configs: CheckpointConfigs) -> str | None:
    """Why a checkpoint of Stable Diffusion XL is not served, such as a refiner, or one with normalised latents."""
    if configs.pipeline.get("requires_aesthetics_score"):
        return "it is a refiner, which takes an aesthetics score; base models are served"
    if configs.autoencoder.get("latents_mean") is not None:
        return "its autoencoder has latents_mean, which diffusers' inpainting does not encode with"
    return unserved_unet(configs, 3, addition_embed_type="text_time")
