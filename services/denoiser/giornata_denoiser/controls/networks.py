"""What ControlNets have to know of the networks that they add to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from giornata.control.protocol import ControlText
from giornata.control.unet import skip_channels
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata_denoiser.families.driven.prompts import EMBEDS, DrivenPrompt
from giornata_denoiser.families.driven.sd3 import POOLED, StableDiffusion3
from giornata_denoiser.families.flux.transformer import FluxPrompt, PackedFlux
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.families.unet.network import TiledUnet
from giornata_denoiser.families.unet.text import UnetPrompt
from giornata_denoiser.rows.row import Prompt


@dataclass(frozen=True)
class Controlled:
    """A network that ControlNets add to."""

    base: ControlBase
    text: Callable[[Prompt], ControlText]
    """The text of one sequence, as ControlNets see it."""


def controlled(network: Network, token_pixels: int) -> Controlled | None:
    """What ControlNets have to know of a `network`; None where diffusers has none for it.

    A token has `token_pixels` pixels of the picture a side.
    """
    if isinstance(network, PackedFlux):
        return Controlled(_flux(network, token_pixels), _flux_text)
    if isinstance(network, TiledUnet):
        return Controlled(_unet(network, token_pixels), _unet_text)
    if isinstance(network, StableDiffusion3):
        return Controlled(_sd3(network, token_pixels), _sd3_text)
    return None


def _flux(network: PackedFlux, token_pixels: int) -> ControlBase:
    model = network.transformer
    singles = len(model.single_transformer_blocks)
    return ControlBase(
        kind=ControlKind.FLUX,
        channels=(int(model.inner_dim),) * (len(model.transformer_blocks) + singles),
        singles=singles,
        latent_channels=network.out_channels,
        token_pixels=token_pixels,
        text_channels=int(model.config.joint_attention_dim),
        pooled_channels=int(model.config.pooled_projection_dim),
    )


def _flux_text(prompt: Prompt) -> ControlText:
    of = cast("FluxPrompt", prompt)
    return ControlText(of.embeds, of.pooled, guidance_scale=of.guidance_scale)


def _unet(network: TiledUnet, token_pixels: int) -> ControlBase:
    pooled = network.text.tensors.get("pooled_prompt_embeds")
    return ControlBase(
        kind=ControlKind.UNET,
        channels=skip_channels(network.unet, network.side),
        latent_channels=network.out_channels * network.side**2,
        token_pixels=token_pixels,
        text_channels=int(network.unet.config.cross_attention_dim),
        pooled_channels=None if pooled is None else pooled[0],
    )


def _unet_text(prompt: Prompt) -> ControlText:
    of = cast("UnetPrompt", prompt)
    return ControlText(of.embeds, of.pooled, of.time_ids)


def _sd3(network: StableDiffusion3, token_pixels: int) -> ControlBase:
    model = network.transformer
    return ControlBase(
        kind=ControlKind.SD3,
        channels=(int(model.inner_dim),) * len(network.pairs),
        latent_channels=network.out_channels,
        token_pixels=token_pixels,
        text_channels=int(model.config.joint_attention_dim),
        pooled_channels=int(model.config.pooled_projection_dim),
    )


def _sd3_text(prompt: Prompt) -> ControlText:
    tensors = cast("DrivenPrompt", prompt).tensors
    return ControlText(tensors[EMBEDS], tensors[POOLED])
