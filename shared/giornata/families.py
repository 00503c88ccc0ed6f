"""The model families that are served, and what is told of one; the table is :mod:`giornata.kinds`. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pkgutil import resolve_name
from typing import Any

from giornata import component_configs
from giornata.component_configs import (
    CachedChannels,
    CheckpointConfigs,
    Config,
    LatentShape,
    Refusal,
    of_flux,
)
from giornata.wire.models import FLOW_MATCHING, Sampler, StepCache, Task


class Family(StrEnum):
    """A model family, and the diffusers pipeline that it equals."""

    FLUX_INPAINT = "flux-inpaint"
    """`FluxInpaintPipeline`: any Flux text-to-image checkpoint; blends with the template after each step."""
    FLUX_KONTEXT = "flux-kontext"
    """`FluxKontextInpaintPipeline`: the picture's clean tokens, or a reference's, attend too; blends."""
    FLUX_FILL = "flux-fill"
    """`FluxFillPipeline`: conditioned on the masked picture; never blends."""
    SD = "sd"
    """`StableDiffusionInpaintPipeline` with a UNet of 4 input channels: Stable Diffusion 1 and 2; blends."""
    SD_INPAINT = "sd-inpaint"
    """`StableDiffusionInpaintPipeline` with one of 9: mask and masked picture are inputs; never blends."""
    SDXL = "sdxl"
    """`StableDiffusionXLInpaintPipeline` with a UNet of 4 input channels; blends."""
    SDXL_INPAINT = "sdxl-inpaint"
    """`StableDiffusionXLInpaintPipeline` with one of 9; never blends."""
    SD3 = "sd3"
    """`StableDiffusion3InpaintPipeline`: Stable Diffusion 3 and 3.5; blends."""
    Z_IMAGE = "z-image"
    """`ZImageInpaintPipeline`; blends."""
    FLUX2 = "flux2"
    """`Flux2Pipeline`: the picture's clean tokens attend too; blends by tokens, as Klein's pipeline does."""
    FLUX2_KLEIN = "flux2-klein"
    """`Flux2KleinInpaintPipeline`: the picture's clean tokens attend too; blends by tokens."""
    FLUX2_KLEIN_KV = "flux2-klein-kv"
    """`Flux2KleinKVPipeline`: references, an edit's picture among them, attend to each other alone; blends."""
    QWEN_IMAGE = "qwen-image"
    """`QwenImageInpaintPipeline`; blends."""
    QWEN_IMAGE_EDIT = "qwen-image-edit"
    """`QwenImageEditInpaintPipeline`: text encoder and network look at the picture, too; blends."""
    QWEN_IMAGE_EDIT_PLUS = "qwen-image-edit-plus"
    """`QwenImageEditPlusPipeline`: both look at references, too; blends."""
    QWEN_IMAGE_21 = "qwen-image-2.1"
    """`QwenImage21Pipeline`: text attends to itself alone; blends."""
    CHROMA = "chroma"
    """`ChromaInpaintPipeline`; blends."""


@dataclass(frozen=True)
class DistilledVariant:
    """The differences of a checkpoint of the kind that was distilled to few steps."""

    told: Callable[[CheckpointConfigs], bool]
    """Whether a checkpoint is."""
    steps: int
    guidance_scale: float | None = None
    """Default of edits and generations; None where it takes no guidance."""


@dataclass(frozen=True)
class CheckpointKind:
    """The common properties of all checkpoints of one kind, and where their folders tell the rest."""

    family: str
    takes_true_cfg: bool
    steps: int
    guidance_scale: float
    strength: float
    """Defaults of requests, unless the checkpoint has a ``serving.json``."""
    generation_guidance_scale: float | None = None
    """Default of generations; None for a kind that generates nothing."""
    generation_steps: int | None = None
    """Default of generations; None where it is that of edits."""
    true_cfg_scale: float = 1.0
    """Default of requests with a negative prompt, where the family takes true classifier-free guidance."""
    guided_above: float | None = None
    """`guidance_scale` is that of classifier-free guidance, computed above this value. None: networks embed it."""
    embeds_guidance: bool = False
    """Whether networks embed it where their configuration does not say: the default of their class in diffusers."""
    distilled: DistilledVariant | None = None
    mask_latents: int = 0
    """Latent pixels a side of the cells in which the family tells edited from kept; 0: it tells single pixels."""
    token_latents: int = 2
    """Latent pixels a side of a token."""
    native_size: int = 1024
    """Pixels a side of its training pictures; used where the checkpoint does not tell."""
    network_size: bool = False
    """Whether the network's `sample_size`, in latent pixels, tells it; else the autoencoder's, in pixels."""
    network: str = "transformer"
    tokenizer: str = "tokenizer_2"
    """Sub-folders: of the denoising network, and of the tokenizer whose length prompts have."""
    max_text_tokens: int = 512
    prompt_frame: int | None = 1
    """How many of these are not the prompt's: an end token, or the head of a chat. None: prompts are never cut."""
    text_chunks: int = 1
    """Longer prompts are encoded in up to so many pieces, each of `max_text_tokens`."""
    references: int = 0
    max_references: int = 0
    replaces_own: bool = False
    causal_references: bool = False
    token_multiple: int = 1
    """Tokens beside a picture's: see :class:`giornata.wire.models.ModelCard`."""
    reuses: bool = True
    """Whether edits reuse unless they ask not to; a family does once a trained model has shown what that costs."""
    samplers: tuple[Sampler, ...] = FLOW_MATCHING
    """What requests may ask for; the default of models with discrete times is the checkpoint's scheduler."""
    step_caches: tuple[StepCache, ...] = (StepCache.TAYLORSEER,)
    """By which rules rows may compute fewer steps."""
    other_text_tokens: int = 0
    """Text tokens of another encoder, or of a picture in the prompt, which come before those."""
    autoencoder: str = "AutoencoderKL"
    latent_shape: Callable[[Config], LatentShape] = component_configs.autoencoder_kl
    """Shape of the autoencoder's latents, from its ``config.json``."""
    kept_channels: Callable[[Config], CachedChannels] = of_flux
    """What a template keeps of a token, from the network's ``config.json``."""
    by_input_channels: Mapping[int, str] | None = None
    """The family by `in_channels` of the network; None where :attr:`family` is that of all. See :meth:`of`."""
    unserved: Refusal = component_configs.unserved_sampling
    """Why a checkpoint is not served, as the end of a sentence."""

    def of(self, family: str) -> CheckpointKind:
        """The kind of those checkpoints alone that are of `family`.

        Where input channels tell another family than :attr:`family`, they are mask and masked picture: such a network
        generates nothing.
        """
        if family == self.family:
            return self
        return replace(self, family=family, generation_guidance_scale=None)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return what its checkpoints are served for."""
        return (Task.EDIT,) if self.generation_guidance_scale is None else (Task.EDIT, Task.GENERATE)


def when_called(name: str) -> Callable[..., Any]:
    """A function that calls `name`, written ``package.module:attribute``; the first call imports its module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve_name(name)(*args, **kwargs)

    return call
