"""Small checkpoints of Stable Diffusion 1, XL and 3 with random weights."""

from __future__ import annotations

from typing import Any, Final

from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from giornata_lab.model.random.autoencoders import NATIVE_PIXELS, autoencoder, sharpen
from giornata_lab.model.random.text_encoders import (
    CORPUS,
    T5_TOKENS,
    clip_config,
    clip_encoder,
    clip_tokenizer,
    text_encoders,
)

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
