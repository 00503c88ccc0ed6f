"""The table of model families: what a checkpoint folder is, by the pipeline that it names. Free of torch.

A checkpoint is a plain diffusers folder (``model_index.json``, one sub-folder per component). A new family is a row of
:data:`KINDS`, a class in prepost's ``families``, and a folder in the denoiser's. Defaults of requests are those of the
family's inpainting pipeline in diffusers; steps and guidance of generations are those of its text-to-image pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from giornata import component_configs
from giornata.component_configs import of_joint, of_unet, of_z_image
from giornata.families import CheckpointKind, DistilledVariant, Family
from giornata.wire.models import DISCRETE_TIME, FLOW_MATCHING, WITH_LIGHTNING

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
    unserved=component_configs.unserved_sd,
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
