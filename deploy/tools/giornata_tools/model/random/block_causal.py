"""Small checkpoints of the block-causal families, Flux.2 Klein-KV and Qwen-Image 2.1, with random weights."""

from __future__ import annotations

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinKVPipeline,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)

from giornata_prepost.families.processors import PICTURE, QwenTextProcessor
from giornata_tools.model.random.autoencoders import qwen_21_autoencoder, sharpen
from giornata_tools.model.random.flow_transformers import BLOCKS, SHIFTED_BY_SIZE, TEXT_TOKENS, flux2_klein
from giornata_tools.model.random.qwen_text import CHAT_IN_PARTS, qwen3_vl, qwen_tokenizer
from giornata_tools.model.random.stable_diffusion import GAIN, JOINT, WIDTH


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
