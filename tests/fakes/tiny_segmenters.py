"""Tiny segmenters with random weights, as folders of transformers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    BertConfig,
    BertTokenizer,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    CLIPTokenizer,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoProcessor,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2Processor,
    OwlViTConfig,
    OwlViTForObjectDetection,
    OwlViTProcessor,
    Sam2Config,
    Sam2Model,
    SwinConfig,
)
from transformers.models.grounding_dino.image_processing_pil_grounding_dino import (
    GroundingDinoImageProcessorPil,
)
from transformers.models.owlv2.image_processing_pil_owlv2 import Owlv2ImageProcessorPil
from transformers.models.owlvit.image_processing_pil_owlvit import OwlViTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

SIDE: Final = 64


def _tokenizer(length: int = 77) -> CLIPTokenizer:
    letters = list(string.printable.strip())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def _text(tokenizer: CLIPTokenizer, length: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}


def clipseg(folder: Path) -> Path:
    """A CLIPSeg that sees 64 x 64 pixels."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = CLIPSegConfig(
        text_config=_text(tokenizer, 77),
        vision_config=VISION,
        projection_dim=32,
        extract_layers=[0, 1, 2],
        reduce_dim=16,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )
    CLIPSegForImageSegmentation(config).save_pretrained(folder)
    images = ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    CLIPSegProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def owlvit(folder: Path) -> Path:
    """An OWL-ViT with 64 boxes."""
    return _owl(folder, OwlViTConfig, OwlViTForObjectDetection, OwlViTImageProcessorPil, OwlViTProcessor)


def owlv2(folder: Path) -> Path:
    """An OWLv2 with 64 boxes, which pads a picture to a square."""
    return _owl(folder, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessorPil, Owlv2Processor)


def _owl(folder: Path, config: Any, network: Any, images: Any, processor: Any) -> Path:
    """A network of these classes, with its processor."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(16)
    made = config(text_config=_text(tokenizer, 16), vision_config=VISION, projection_dim=32)
    network(made).save_pretrained(folder)
    processor(images(size={"height": SIDE, "width": SIDE}), tokenizer).save_pretrained(folder)
    return folder


def grounding_dino(folder: Path) -> Path:
    """A Grounding DINO with 20 queries."""
    torch.manual_seed(0)
    letters = [*string.ascii_lowercase, *string.digits, ".", "?"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=256)
    config = GroundingDinoConfig(
        backbone_config=SwinConfig(
            embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], window_size=4, image_size=SIDE,
            out_features=["stage2", "stage3", "stage4"],
        ),
        text_config=BertConfig(
            vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        ),
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=20,
    )  # fmt: skip
    GroundingDinoForObjectDetection(config).save_pretrained(folder)
    images = GroundingDinoImageProcessorPil(size={"shortest_edge": SIDE, "longest_edge": 2 * SIDE})
    GroundingDinoProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def sam2(folder: Path) -> Path:
    """A SAM 2 that sees 128 x 128 pixels."""
    torch.manual_seed(0)
    config = Sam2Config(
        vision_config={
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": 12,
                "num_attention_heads": 1,
                "image_size": [128, 128],
                "blocks_per_stage": [1, 2, 2, 1],
                "embed_dim_per_stage": [12, 24, 48, 96],
                "num_attention_heads_per_stage": [1, 2, 4, 8],
                "window_size_per_stage": [4, 2, 4, 2],
                "window_positional_embedding_background_size": [4, 4],
                "global_attention_blocks": [4],
            },
            "backbone_channel_list": [96, 48, 24, 12],
            "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
            "fpn_hidden_size": 32,
        },
        prompt_encoder_config={
            "hidden_size": 32,
            "image_size": 128,
            "patch_size": 16,
            "mask_input_channels": 8,
        },
        mask_decoder_config={
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 32,
        },
    )
    Sam2Model(config).save_pretrained(folder)
    return folder
