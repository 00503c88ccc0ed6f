"""sinopia, a small CLIPSeg as transformers loads it: its parts, untrained, and how well it finds what phrases mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import (
    AutoProcessor,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    CLIPTokenizer,
    ViTImageProcessorPil,
)

from giornata_lab.model.random import text_encoders
from giornata_lab.model.scenes.shapes import Mask, overlap
from giornata_lab.model.segmenter import scenes
from giornata_lab.model.segmenter.scenes import HELD_OUT, NAMING, NamedScene, Phrase, PhraseKind, held_out
from giornata_tools.checkout import SEGMENTER

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


CARD: Final = "card.json"
WEIGHTS: Final = "model.safetensors"
"""transformers' name for a model's weights."""


class SegmenterCard(BaseModel):
    """How the segmenter came to be, and how well it finds what it is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    command: str
    seed: int
    steps: int
    sha256: str
    """sha-256 of the weights' file."""
    size_bytes: int
    """Size of the weights' file."""
    measured: dict[int, dict[str, float]] = {}
    """Side of the pictures in pixels → figures of held-out scenes; `python -m giornata_lab.model.segmenter` writes
    them."""

    def write(self, folder: Path = SEGMENTER) -> None:
        """Put the card where `read` finds it."""
        (folder / CARD).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path = SEGMENTER) -> SegmenterCard:
    """The card of the segmenter in `folder`."""
    return SegmenterCard.model_validate_json((folder / CARD).read_bytes())


Figures = dict[str, float]
LIKELY: Final = 0.5
"""Chance from which a pixel is meant, as prepost's default for a CLIPSeg."""
NOTHING: Final = 0.001
"""A mask of a smaller part of the picture finds nothing."""


@dataclass(frozen=True)
class ReferenceSegmenter:
    """A checkpoint as transformers loads it, in float32."""

    model: CLIPSegForImageSegmentation
    processor: CLIPSegProcessor

    @classmethod
    def load(cls, folder: Path) -> ReferenceSegmenter:
        """The checkpoint in `folder`."""
        model = CLIPSegForImageSegmentation.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoProcessor.from_pretrained(folder))

    @torch.inference_mode()
    def masks(self, picture: np.ndarray, texts: Sequence[str]) -> list[Mask]:
        """Return what each of `texts` means in `picture`, (height, width, 3) uint8; masks are (height, width)."""
        read = self.processor(text=list(texts), images=[picture], padding=True, return_tensors="pt")
        pixels = read.pixel_values.expand(len(texts), -1, -1, -1)
        logits = self.model(input_ids=read.input_ids, pixel_values=pixels).logits
        heat = logits.view(len(texts), 1, *pixels.shape[2:]).sigmoid()
        scaled = nn.functional.interpolate(heat, picture.shape[:2], mode="bilinear")
        return [mask.numpy() for mask in scaled[:, 0] >= LIKELY]


def asked(scene: NamedScene, index: int) -> list[Phrase]:
    """A phrase of every kind, and one that names nothing, for the held-out scene `index`; equal at every call."""
    rng = np.random.default_rng((HELD_OUT, len(scene.picture), index, 1))
    there = [scenes.draw(rng, scene, kind) for kind in PhraseKind]
    return [*there, scenes.draw(rng, scene, NAMING[index % len(NAMING)], absent=True)]


def judge(segmenter: ReferenceSegmenter, side: int, count: int) -> Figures:
    """Mean overlaps with the truth over `count` held-out scenes of `side` pixels.

    `overlap` is over all phrases that mean something, `tenth` what a tenth of them stay below, those of `PhraseKind`
    are over phrases of that kind; `absent` is the part of the phrases that mean nothing for which nothing is found.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for index, scene in enumerate(held_out(side, count)):
        every = asked(scene, index)
        for phrase, mask in zip(every, segmenter.masks(scene.picture, [p.text for p in every]), strict=True):
            truth = scenes.mask_of(scene, phrase)
            if truth.any():
                found[phrase.kind].append(overlap(mask, truth))
            else:
                found["absent"].append(float(mask.mean() < NOTHING))
    overlaps = [value for kind in PhraseKind for value in found[kind]]
    return {
        "overlap": _rounded(overlaps),
        "tenth": round(float(np.quantile(overlaps, 0.1)), 4),
        **{name: _rounded(found[name]) for name in (*PhraseKind, "absent")},
    }


def _rounded(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)
