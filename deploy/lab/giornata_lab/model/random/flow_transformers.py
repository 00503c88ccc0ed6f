"""Small checkpoints of flow-matching transformers with random weights."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from diffusers import (
    ChromaInpaintPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2KleinKVPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxTransformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
    QwenImageInpaintPipeline,
    QwenImageTransformer2DModel,
    ZImageInpaintPipeline,
    ZImageTransformer2DModel,
)

from giornata_lab.model.random.autoencoders import (
    autoencoder,
    klein_autoencoder,
    qwen_21_autoencoder,
    qwen_autoencoder,
    sharpen,
)
from giornata_lab.model.random.stable_diffusion import GAIN, JOINT, WIDTH
from giornata_lab.model.random.text_encoders import (
    CHAT_IN_PARTS,
    CORPUS,
    T5_TOKENS,
    VISION,
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

# Small checkpoints of Flux, Flux Kontext and Flux Fill with random weights.


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


# Small checkpoints of Z-Image, Flux.2 and Klein, Qwen-Image and Chroma with random weights.


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


# Small checkpoints of the block-causal families, Flux.2 Klein-KV and Qwen-Image 2.1, with random weights.


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
