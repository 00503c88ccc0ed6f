"""Small checkpoints of Z-Image, Flux.2 and Klein, Qwen-Image and Chroma with random weights."""

from __future__ import annotations

from typing import Any, Final

from diffusers import (
    ChromaInpaintPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
    QwenImageInpaintPipeline,
    QwenImageTransformer2DModel,
    ZImageInpaintPipeline,
    ZImageTransformer2DModel,
)

from giornata_tools.model.random.autoencoders import (
    autoencoder,
    klein_autoencoder,
    qwen_autoencoder,
    sharpen,
)
from giornata_tools.model.random.mistral_text import mistral3, mistral_processor
from giornata_tools.model.random.qwen_text import (
    VISION,
    picture_processor,
    qwen3,
    qwen3_causal,
    qwen_tokenizer,
    qwen_vl,
)
from giornata_tools.model.random.stable_diffusion import GAIN, JOINT, WIDTH
from giornata_tools.model.text import CORPUS, T5_TOKENS, text_encoders

TEXT_TOKENS: Final = 48
KLEIN_LAYERS: Final = 27
"""Klein reads the outputs of layers 9, 18 and 27."""
BLOCKS: Final[dict[str, Any]] = {
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "num_layers": 2,
}
SHIFTED_BY_SIZE: Final[dict[str, Any]] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
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
