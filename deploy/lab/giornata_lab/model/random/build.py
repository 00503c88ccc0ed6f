"""Builds a small checkpoint of a family with random weights, in diffusers' layout and without a download.

``python -m giornata_lab.model.random.build FOLDER --family flux-inpaint [--seed 0]``

The folder loads with the family's inpainting pipeline like a published checkpoint; equal seeds give equal bytes. What
it paints is texture: it exercises the system, it knows nothing of pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    ChromaInpaintPipeline,
    ChromaTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2KleinKVPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
    QwenImageInpaintPipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
    ZImageInpaintPipeline,
    ZImageTransformer2DModel,
)
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from giornata.families import Family
from giornata_lab.model.random.text_encoders import (
    CHAT_IN_PARTS,
    CORPUS,
    T5_TOKENS,
    VISION,
    clip_config,
    clip_encoder,
    clip_tokenizer,
    mistral3,
    mistral_processor,
    picture_processor,
    qwen3,
    qwen3_causal,
    qwen3_vl,
    qwen_tokenizer,
    qwen_vl,
    text_encoders,
)
from giornata_prepost.families.processors import PICTURE, QwenTextProcessor

WIDTHS: Final = (8, 16, 16, 16)
"""Four levels: 8 pixels a latent pixel."""
NATIVE_PIXELS: Final = 256


def autoencoder(
    channels: int, scaling_factor: float, shift_factor: float | None = None, *, quant: bool = False
) -> AutoencoderKL:
    """An `AutoencoderKL` with latents of so many channels; `quant`: with 1x1 convolutions around them, as SD has."""
    return AutoencoderKL(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(WIDTHS),
        norm_num_groups=4,
        sample_size=NATIVE_PIXELS,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    ).eval()


def klein_autoencoder(channels: int) -> AutoencoderKLFlux2:
    """Flux.2's; its batch norm has random statistics, since those of a fresh one change nothing."""
    model = AutoencoderKLFlux2(
        latent_channels=channels,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=NATIVE_PIXELS,
    ).eval()
    model.bn.running_mean.normal_(std=0.2)
    model.bn.running_var.uniform_(0.5, 2.0)
    return model


def qwen_autoencoder() -> AutoencoderKLQwenImage:
    """Qwen-Image's, with its published statistics by channel."""
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1).eval()


def qwen_21_autoencoder() -> AutoencoderKLQwenImage21:
    """Qwen-Image 2.1's: 16 pixels a latent pixel, transparency, and the published statistics by channel."""
    widths = {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 2, 2, 2]}
    return AutoencoderKLQwenImage21(**widths, num_res_blocks=1).eval()


def sharpen(network: torch.nn.Module, gain: float, names: tuple[str, ...]) -> None:
    """Scale the weights whose names end so: freshly initialised attention is nearly uniform."""
    for name, weight in network.named_parameters():
        if name.endswith(names):
            weight.data.mul_(gain)


WIDTH: Final = 32
"""Width of each text encoder."""
LAYERS: Final = 3
"""Layers of each of CLIP's."""
GAIN: Final = 2.0
ATTENTION: Final = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
JOINT: Final = (*ATTENTION, "norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")
"""Weights by which tokens see each other: of UNets, and of joint attention with normalised queries and keys."""
LATENT_SIDE: Final = NATIVE_PIXELS // 8
BETAS: Final[dict[str, Any]] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def stable_diffusion(channels: int) -> StableDiffusionInpaintPipeline:
    """Stable Diffusion 1.5, with a UNet of 4 or 9 input `channels`."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=channels,
        out_channels=4,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=WIDTH,
        norm_num_groups=8,
    ).eval()
    sharpen(unet, GAIN, ATTENTION)
    return StableDiffusionInpaintPipeline(
        vae=autoencoder(4, 0.18215, quant=True),
        text_encoder=clip_encoder(tokenizer, width=WIDTH, layers=LAYERS).eval(),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl(channels: int) -> StableDiffusionXLInpaintPipeline:
    """Stable Diffusion XL, with a UNet of 4 or 9 input `channels`."""
    tokenizer, tokenizer_2 = clip_tokenizer(), clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=channels,
        out_channels=4,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 1, 2],
        attention_head_dim=[2, 4, 8],
        cross_attention_dim=2 * WIDTH,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
        norm_num_groups=8,
    ).eval()
    sharpen(unet, GAIN, ATTENTION)
    return StableDiffusionXLInpaintPipeline(
        vae=autoencoder(4, 0.13025, quant=True),
        text_encoder=clip_encoder(tokenizer, width=WIDTH, layers=LAYERS).eval(),
        text_encoder_2=_clip_projected(tokenizer_2),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
        add_watermarker=False,
    )


def stable_diffusion_3() -> StableDiffusion3InpaintPipeline:
    """Stable Diffusion 3.5: its first block attends twice."""
    clips = [clip_tokenizer(), clip_tokenizer()]
    text = text_encoders(CORPUS, T5_TOKENS, width=2 * WIDTH, layers=2)
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=64,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    return StableDiffusion3InpaintPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(16, 1.5305, 0.0609),
        text_encoder=_clip_projected(clips[0]),
        tokenizer=clips[0],
        text_encoder_2=_clip_projected(clips[1]),
        tokenizer_2=clips[1],
        text_encoder_3=text.t5.eval(),
        tokenizer_3=text.t5_tokenizer,
    )


def _clip_projected(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config(tokenizer, WIDTH, LAYERS)).eval()


P = TypeVar("P", FluxInpaintPipeline, FluxKontextInpaintPipeline, FluxFillPipeline)

SHIFTED_BY_SIZE: Final[dict[str, Any]] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
}
"""The configuration that FLUX.1-dev and FLUX.1-Fill-dev publish; what it leaves out is diffusers' default."""

LATENT_CHANNELS: Final = 16
VAE_SCALE_FACTOR: Final = 8
PATCH_CHANNELS: Final = 4 * LATENT_CHANNELS
"""A token is a patch of 2x2 latent pixels."""
FILL_CHANNELS: Final = 2 * PATCH_CHANNELS + 4 * VAE_SCALE_FACTOR**2
"""Fill's tokens carry the noisy latent, the masked picture's latent and the mask's 16x16 pixels."""
TEXT_WIDTH: Final = 32
HEADS: Final = 4
ROPE_AXES: Final = (8, 12, 12)
"""Head channels that encode text position, row and column; their sum is the width of a head."""

ATTENTION_GAIN: Final = 3.0
"""Freshly initialised attention is nearly uniform: changing all other tokens changes a token by 0.5 %, which a test
of exactness might not see. With this gain on queries, keys, values and outputs it is 60 %."""
ATTENTION_WEIGHTS: Final = (
    "attn.norm_q.weight",
    "attn.norm_k.weight",
    "attn.norm_added_q.weight",
    "attn.norm_added_k.weight",
    "attn.to_v.weight",
    "attn.add_v_proj.weight",
    "attn.to_out.0.weight",
    "attn.to_add_out.weight",
)


def flux(kind: type[P]) -> P:
    """Flux, Flux Kontext or Flux Fill, as `kind` says."""
    vae = autoencoder(LATENT_CHANNELS, 0.3611, 0.1159)
    text = text_encoders(CORPUS, T5_TOKENS, width=TEXT_WIDTH, layers=2)
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED_BY_SIZE),
        vae=vae,
        text_encoder=text.clip.eval(),
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.t5.eval(),
        tokenizer_2=text.t5_tokenizer,
        transformer=_transformer(FILL_CHANNELS if kind is FluxFillPipeline else PATCH_CHANNELS),
    )


def _transformer(in_channels: int) -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=in_channels,
        out_channels=PATCH_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=sum(ROPE_AXES),
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=ROPE_AXES,
    ).eval()
    for name, weight in transformer.named_parameters():
        if name.endswith(ATTENTION_WEIGHTS) or _is_single_block_output(name):
            weight.data.mul_(ATTENTION_GAIN)
    return transformer


def _is_single_block_output(name: str) -> bool:
    """A single-stream block has one projection for what its attention and its MLP add."""
    return name.startswith("single_transformer_blocks.") and name.endswith(".proj_out.weight")


TEXT_TOKENS: Final = 48
KLEIN_LAYERS: Final = 27
"""Klein reads the outputs of layers 9, 18 and 27."""
BLOCKS: Final[dict[str, Any]] = {
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "num_layers": 2,
}


def z_image() -> ZImageInpaintPipeline:
    """Z-Image, the base model."""
    tokenizer = qwen_tokenizer(TEXT_TOKENS)
    transformer = ZImageTransformer2DModel(
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[256, 64, 64],
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    return ZImageInpaintPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoder(16, 0.3611, 0.1159),
        text_encoder=qwen3(tokenizer, WIDTH, 3),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def flux2_klein() -> Flux2KleinInpaintPipeline:
    """Flux.2 Klein, the base model."""
    tokenizer = qwen_tokenizer(TEXT_TOKENS)
    return Flux2KleinInpaintPipeline(
        text_encoder=qwen3_causal(tokenizer, WIDTH, KLEIN_LAYERS),
        tokenizer=tokenizer,
        **_flux2_parts(guidance_embeds=False),
    )


def flux2() -> Flux2Pipeline:
    """Flux.2 dev; its processor knows text alone, and the folder says that it is Pixtral's."""
    processor = mistral_processor(TEXT_TOKENS)
    pipeline = Flux2Pipeline(
        text_encoder=mistral3(processor.tokenizer, WIDTH, 31),  # those of 10, 20 and 30 are read
        tokenizer=processor,
        **_flux2_parts(guidance_embeds=True),
    )
    pipeline.register_to_config(tokenizer=("transformers", "PixtralProcessor"))
    return pipeline


def _flux2_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    channels = 8
    transformer = Flux2Transformer2DModel(
        in_channels=4 * channels,
        **BLOCKS,
        num_single_layers=2,
        joint_attention_dim=3 * WIDTH,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=guidance_embeds,
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    scheduler = FlowMatchEulerDiscreteScheduler(**SHIFTED_BY_SIZE)
    return {"scheduler": scheduler, "vae": klein_autoencoder(channels), "transformer": transformer}


def qwen_image() -> QwenImageInpaintPipeline:
    """Qwen-Image."""
    tokenizer = qwen_tokenizer(TEXT_TOKENS)
    transformer = QwenImageTransformer2DModel(
        **BLOCKS, joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12)
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    return QwenImageInpaintPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED_BY_SIZE | {"shift": 1.0}, shift_terminal=0.02),
        vae=qwen_autoencoder(),
        text_encoder=qwen_vl(tokenizer, WIDTH, 2),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def qwen_image_edit() -> QwenImageEditInpaintPipeline:
    """Qwen-Image-Edit: Qwen-Image's components, whose text encoder sees pictures."""
    parts = qwen_image().components
    tokenizer = qwen_tokenizer(TEXT_TOKENS, VISION)
    processor = picture_processor(tokenizer)
    encoder = qwen_vl(tokenizer, WIDTH, 2)
    pipeline = QwenImageEditInpaintPipeline(
        **parts | {"tokenizer": tokenizer, "text_encoder": encoder, "processor": processor}
    )
    pipeline.register_to_config(processor=("transformers", "Qwen2VLProcessor"))
    return pipeline


def qwen_image_edit_plus() -> QwenImageEditPlusPipeline:
    """Qwen-Image-Edit 2511: its components, whose transformer modulates clean pictures as at timestep 0."""
    single = qwen_image_edit()
    single.transformer.register_to_config(zero_cond_t=True)
    transformer = QwenImageTransformer2DModel.from_config(single.transformer.config)
    transformer.load_state_dict(single.transformer.state_dict())
    pipeline = QwenImageEditPlusPipeline(**single.components | {"transformer": transformer.eval()})
    pipeline.register_to_config(processor=("transformers", "Qwen2VLProcessor"))
    return pipeline


def chroma() -> ChromaInpaintPipeline:
    """Chroma."""
    text = text_encoders(CORPUS, T5_TOKENS, width=WIDTH, layers=2)
    transformer = ChromaTransformer2DModel(
        **BLOCKS,
        num_single_layers=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=2,
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    return ChromaInpaintPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED_BY_SIZE),
        vae=autoencoder(16, 0.3611, 0.1159),
        text_encoder=text.t5.eval(),
        tokenizer=text.t5_tokenizer,
        transformer=transformer,
    )


def flux2_klein_kv() -> Flux2KleinKVPipeline:
    """Flux.2 Klein-KV: Klein's components."""
    return Flux2KleinKVPipeline(**flux2_klein().components)


def qwen_image_21() -> QwenImage21Pipeline:
    """Qwen-Image 2.1; its processor knows text alone, and the folder says that it is diffusers'."""
    tokenizer = qwen_tokenizer(TEXT_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_IN_PARTS
    transformer = QwenImage21Transformer2DModel(
        **BLOCKS, context_in_dim=WIDTH, axes_dims_rope=(8, 12, 12)
    ).eval()
    sharpen(transformer, GAIN, JOINT)
    pipeline = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED_BY_SIZE | {"shift": 1.0}, shift_terminal=0.02),
        vae=qwen_21_autoencoder(),
        text_encoder=qwen3_vl(tokenizer, WIDTH, 2),
        processor=QwenTextProcessor(tokenizer),
        transformer=transformer,
    )
    pipeline.register_to_config(processor=("transformers", "Qwen3VLProcessor"))
    return pipeline


BUILDERS: Final[dict[Family, Callable[[], Any]]] = {
    Family.FLUX_INPAINT: partial(flux, FluxInpaintPipeline),
    Family.FLUX_KONTEXT: partial(flux, FluxKontextInpaintPipeline),
    Family.FLUX_FILL: partial(flux, FluxFillPipeline),
    Family.SD: partial(stable_diffusion, 4),
    Family.SD_INPAINT: partial(stable_diffusion, 9),
    Family.SDXL: partial(stable_diffusion_xl, 4),
    Family.SDXL_INPAINT: partial(stable_diffusion_xl, 9),
    Family.SD3: stable_diffusion_3,
    Family.Z_IMAGE: z_image,
    Family.FLUX2: flux2,
    Family.FLUX2_KLEIN: flux2_klein,
    Family.FLUX2_KLEIN_KV: flux2_klein_kv,
    Family.QWEN_IMAGE: qwen_image,
    Family.QWEN_IMAGE_EDIT: qwen_image_edit,
    Family.QWEN_IMAGE_EDIT_PLUS: qwen_image_edit_plus,
    Family.QWEN_IMAGE_21: qwen_image_21,
    Family.CHROMA: chroma,
}
"""Makes a diffusers pipeline of each family, of weights from torch's global generator."""


def build(family: Family, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of `family` into `folder`, which is made where it does not exist.

    Args:
        family: decides the pipeline, and the input channels of its network.
        folder: receives `model_index.json` and one sub-folder per component.
        seed: of every weight; the process's own random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[family]()
    pipeline.save_pretrained(folder, safe_serialization=True)


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--family", type=click.Choice([str(family) for family in Family]), default=str(Family.FLUX_INPAINT)
)
@click.option("--seed", type=int, default=0, help="Of the weights.")
def main(folder: Path, family: str, seed: int) -> None:
    """Build a checkpoint with random weights in FOLDER."""
    build(Family(family), folder, seed)


if __name__ == "__main__":
    main()
