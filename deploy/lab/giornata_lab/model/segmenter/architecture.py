"""sinopia's components, untrained: a small CLIPSeg, its tokenizer and its processor, as transformers loads them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import (
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    CLIPTokenizer,
    ViTImageProcessorPil,
)

from giornata_lab.model.random import text_encoders
from giornata_lab.model.segmenter import scenes

SIDE: Final = 96
"""Pixels to which every picture is scaled."""
PATCH: Final = 4
"""Pixels a token is wide and high; a picture has 24x24 tokens."""
GRID: Final = SIDE // PATCH
WIDTH: Final = 96
LAYERS: Final = 4
HEADS: Final = 3
TAKEN: Final = (1, 3)
"""Layers whose outputs the decoder takes, one decoder layer each, the last one first."""
DECODER_WIDTH: Final = 64
DECODER_HEADS: Final = 2
TEXT_WIDTH: Final = 64
TEXT_HEADS: Final = 4
PIXEL_MEAN: Final = 0.5
PIXEL_DEVIATION: Final = 0.25
RARE: Final = -2.0
"""Logit at which masks begin: most pixels are not meant."""


def tokenizer() -> CLIPTokenizer:
    """Every word of the phrases is one token; prompts are read up to CLIP's 77."""
    return text_encoders.clip_tokenizer(" ".join(scenes.words()))


def processor() -> CLIPSegProcessor:
    """Scales pictures to `SIDE` squared, and tokenizes."""
    images = ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[PIXEL_MEAN] * 3, image_std=[PIXEL_DEVIATION] * 3
    )
    return CLIPSegProcessor(images, tokenizer())


def segmenter() -> CLIPSegForImageSegmentation:
    """CLIPSeg (Lüddecke and Ecker, CVPR 2022) with 0.8 M weights."""
    words = tokenizer()
    read: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": TEXT_HEADS,
        "max_position_embeddings": words.model_max_length,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    seen: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_act": "relu",
    }
    config = CLIPSegConfig(
        text_config=read,
        vision_config=seen,
        projection_dim=TEXT_WIDTH,
        extract_layers=list(TAKEN),
        reduce_dim=DECODER_WIDTH,
        decoder_num_attention_heads=DECODER_HEADS,
        decoder_intermediate_size=4 * DECODER_WIDTH,
    )
    model = CLIPSegForImageSegmentation(config)
    _begin(model)
    return model


@torch.no_grad()
def _begin(model: CLIPSegForImageSegmentation) -> None:
    """Let the first layers begin with all of the picture: pixels keep their distances, places are told in waves.

    The norm that follows takes away how bright a patch is, unless what is added to every patch has a length of its own.
    """
    seen = model.clip.vision_model.embeddings
    nn.init.orthogonal_(seen.patch_embedding.weight.view(WIDTH, -1))
    seen.position_embedding.weight.copy_(0.5 * torch.randn(WIDTH))
    seen.position_embedding.weight[1:] += 0.5 * waves().flatten(0, 1)
    nn.init.ones_(model.decoder.film_mul.bias)
    nn.init.constant_(model.decoder.transposed_convolution.bias, RARE)


def waves() -> torch.Tensor:
    """(GRID, GRID, WIDTH): sines and cosines of row and column, at wavelengths from two sides to two tokens."""
    quarter = WIDTH // 4
    frequencies = torch.pi * torch.logspace(-torch.tensor(float(GRID)).log2().item(), 0, quarter, base=2.0)
    angles = torch.arange(GRID)[:, None] * frequencies
    along = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = along[:, None].expand(-1, GRID, -1), along[None].expand(GRID, -1, -1)
    return torch.cat([rows, columns], dim=2)
