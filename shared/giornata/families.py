"""The table of model families: what a checkpoint folder is, by the pipeline that it names. Free of torch.

A new family is a row of :data:`KINDS`, a class in prepost's ``families``, and a network in the denoiser's. Defaults of
requests are those of the family's inpainting pipeline in diffusers; steps and guidance of generations are those of its
text-to-image pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final

from giornata import component_configs
from giornata.component_configs import (
    CachedChannels,
    CheckpointConfigs,
    Config,
    LatentShape,
    Refusal,
    of_flux,
    of_joint,
    of_unet,
    of_z_image,
)
from giornata.wire.models import DISCRETE_TIME, FLOW_MATCHING, WITH_LIGHTNING, Sampler, StepCache, Task


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


_FLUX_INPAINT: Final = CheckpointKind(
    Family.FLUX_INPAINT,
    takes_true_cfg=True,
    steps=28,
    guidance_scale=7.0,
    strength=0.6,
    generation_guidance_scale=3.5,
    distilled=DistilledVariant(lambda found: not found.network.get("guidance_embeds"), steps=4),
    mask_latents=1,
)
_SD: Final = CheckpointKind(
    Family.SD,
    takes_true_cfg=False,
    steps=50,
    guidance_scale=7.5,
    strength=1.0,
    generation_guidance_scale=7.5,
    guided_above=1.0,
    mask_latents=1,
    token_latents=8,
    step_caches=(),  # no settings are published for a UNet's outputs
    samplers=DISCRETE_TIME,
    network_size=True,
    network="unet",
    tokenizer="tokenizer",
    max_text_tokens=77,
    prompt_frame=2,
    text_chunks=4,
    kept_channels=partial(of_unet, 8),
    by_input_channels={4: Family.SD, 9: Family.SD_INPAINT},
    unserved=partial(component_configs.unserved_unet, levels=4, addition_embed_type=None),
)
_SDXL: Final = replace(
    _SD,
    family=Family.SDXL,
    strength=0.9999,
    generation_guidance_scale=5.0,
    token_latents=4,
    kept_channels=partial(of_unet, 4),
    by_input_channels={4: Family.SDXL, 9: Family.SDXL_INPAINT},
    unserved=component_configs.unserved_sdxl,
)
_SD3: Final = CheckpointKind(
    Family.SD3,
    takes_true_cfg=False,
    steps=50,
    guidance_scale=7.0,
    strength=0.6,
    generation_guidance_scale=7.0,
    generation_steps=28,
    guided_above=1.0,
    mask_latents=1,
    network_size=True,
    tokenizer="tokenizer_3",
    max_text_tokens=256,
    other_text_tokens=77,
    kept_channels=of_joint,
    by_input_channels={16: Family.SD3},
)
_Z_IMAGE: Final = CheckpointKind(
    Family.Z_IMAGE,
    takes_true_cfg=False,
    steps=50,
    guidance_scale=5.0,
    strength=1.0,
    generation_guidance_scale=5.0,
    guided_above=0.0,
    # no entry tells Z-Image-Turbo, except that its noise levels are shifted by 3 where the base model's are by 6
    distilled=DistilledVariant(
        lambda found: float(found.scheduler.get("shift", 6)) <= 3, steps=9, guidance_scale=0.0
    ),
    mask_latents=1,
    tokenizer="tokenizer",
    prompt_frame=3,
    token_multiple=32,
    kept_channels=of_z_image,
)
_FLUX2_KLEIN: Final = CheckpointKind(
    Family.FLUX2_KLEIN,
    takes_true_cfg=False,
    steps=50,
    guidance_scale=8.0,
    strength=0.8,
    generation_guidance_scale=4.0,
    guided_above=1.0,
    distilled=DistilledVariant(lambda found: bool(found.pipeline.get("is_distilled")), steps=4),
    mask_latents=2,
    references=1,
    max_references=4,
    tokenizer="tokenizer",
    prompt_frame=3,
    autoencoder="AutoencoderKLFlux2",
)
_FLUX2_KLEIN_KV: Final = replace(
    _FLUX2_KLEIN,
    family=Family.FLUX2_KLEIN_KV,
    steps=4,
    guidance_scale=1.0,
    generation_guidance_scale=1.0,
    guided_above=None,
    distilled=None,
    causal_references=True,
)
_FLUX2: Final = replace(
    _FLUX2_KLEIN,
    family=Family.FLUX2,
    guidance_scale=4.0,
    strength=1.0,  # the pipeline begins all of a picture from noise
    guided_above=None,
    embeds_guidance=True,
    distilled=None,
    max_references=8,
    prompt_frame=31,  # the pipeline's system message, between marks
)
_QWEN_IMAGE: Final = CheckpointKind(
    Family.QWEN_IMAGE,
    takes_true_cfg=True,
    steps=50,
    guidance_scale=1.0,
    strength=0.6,
    generation_guidance_scale=1.0,
    true_cfg_scale=4.0,
    samplers=WITH_LIGHTNING,
    mask_latents=1,
    tokenizer="tokenizer",
    prompt_frame=0,
    autoencoder="AutoencoderKLQwenImage",
    latent_shape=component_configs.autoencoder_qwen,
    kept_channels=of_joint,
)
_QWEN_IMAGE_EDIT: Final = replace(
    _QWEN_IMAGE,
    family=Family.QWEN_IMAGE_EDIT,
    # an instruction begins all of the picture from noise, as QwenImageEditPipeline does; its inpainting has 0.6
    strength=1.0,
    generation_guidance_scale=None,
    references=1,
    prompt_frame=None,
    other_text_tokens=(1024 // 28) ** 2,
)
_QWEN_IMAGE_EDIT_PLUS: Final = replace(
    _QWEN_IMAGE_EDIT,
    family=Family.QWEN_IMAGE_EDIT_PLUS,
    max_references=4,
    other_text_tokens=5 * 200,  # of pictures of about 384² pixels, which have 28² a token, and their numbers
)
_QWEN_IMAGE_21: Final = replace(
    _QWEN_IMAGE,
    family=Family.QWEN_IMAGE_21,
    steps=40,
    true_cfg_scale=1.0,
    samplers=FLOW_MATCHING,
    token_latents=1,
    tokenizer="processor",
    prompt_frame=None,
    autoencoder="AutoencoderKLQwenImage21",
    latent_shape=component_configs.autoencoder_qwen_21,
    unserved=component_configs.unserved_qwen_21,
)
_CHROMA: Final = CheckpointKind(
    Family.CHROMA,
    takes_true_cfg=False,
    steps=28,
    guidance_scale=7.0,
    strength=0.6,
    generation_guidance_scale=5.0,
    generation_steps=35,
    guided_above=1.0,
    mask_latents=1,
    tokenizer="tokenizer",
    max_text_tokens=256,
)
_FLUX_KONTEXT: Final = replace(
    _FLUX_INPAINT,
    family=Family.FLUX_KONTEXT,
    guidance_scale=3.5,
    strength=1.0,
    distilled=None,
    references=1,
    max_references=1,
    replaces_own=True,
)
KINDS: Final[dict[str, CheckpointKind]] = {
    "FluxPipeline": _FLUX_INPAINT,
    "FluxInpaintPipeline": _FLUX_INPAINT,
    "FluxImg2ImgPipeline": _FLUX_INPAINT,
    "FluxKontextPipeline": _FLUX_KONTEXT,
    "FluxKontextInpaintPipeline": _FLUX_KONTEXT,
    "FluxFillPipeline": CheckpointKind(
        Family.FLUX_FILL,
        takes_true_cfg=False,
        steps=50,
        guidance_scale=30.0,
        strength=1.0,
    ),
    "StableDiffusionPipeline": _SD,
    "StableDiffusionInpaintPipeline": _SD,
    "StableDiffusionImg2ImgPipeline": _SD,
    "StableDiffusionXLPipeline": _SDXL,
    "StableDiffusionXLInpaintPipeline": _SDXL,
    "StableDiffusionXLImg2ImgPipeline": _SDXL,
    "StableDiffusion3Pipeline": _SD3,
    "StableDiffusion3InpaintPipeline": _SD3,
    "StableDiffusion3Img2ImgPipeline": _SD3,
    "ZImagePipeline": _Z_IMAGE,
    "ZImageInpaintPipeline": _Z_IMAGE,
    "ZImageImg2ImgPipeline": _Z_IMAGE,
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": _FLUX2_KLEIN,
    "Flux2KleinInpaintPipeline": _FLUX2_KLEIN,
    "Flux2KleinKVPipeline": _FLUX2_KLEIN_KV,
    "QwenImagePipeline": _QWEN_IMAGE,
    "QwenImageInpaintPipeline": _QWEN_IMAGE,
    "QwenImageImg2ImgPipeline": _QWEN_IMAGE,
    "QwenImageEditPipeline": _QWEN_IMAGE_EDIT,
    "QwenImageEditInpaintPipeline": _QWEN_IMAGE_EDIT,
    "QwenImageEditPlusPipeline": _QWEN_IMAGE_EDIT_PLUS,
    "QwenImage21Pipeline": _QWEN_IMAGE_21,
    "ChromaPipeline": _CHROMA,
    "ChromaInpaintPipeline": _CHROMA,
    "ChromaImg2ImgPipeline": _CHROMA,
}
"""`_class_name` of a checkpoint's model_index.json → what it is."""
