"""The only stage of sinopia: pictures and phrases to masks.

Small pictures teach colours and shapes at a fraction of the cost; pictures of the model's own size follow. A small
picture takes a random window of the position embedding. Every picture is encoded once and asked several phrases. Beside
the masks, a head that does not ship learns colours and shapes from the encoder's tokens: all of a picture teaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, CLIPSegForImageSegmentation

from giornata_lab.model.scenes.shapes import SHAPES
from giornata_lab.model.segmenter import clipseg
from giornata_lab.model.segmenter import scenes as phrases
from giornata_lab.model.segmenter.clipseg import GRID, PATCH, SIDE, TAKEN
from giornata_lab.model.segmenter.scenes import GROUND, NAMES, NamedScene, sample
from giornata_lab.model.train.run import Losses, StagePlan, TrainingLoop, cosine, optimisers

TITLE: Final = "segmenter"
BATCHES: Final = ((0.65, 48, 16), (1.0, SIDE, 4))
"""Until which part of the run, side in pixels, pictures a step."""
ASKED: Final = 2
"""Phrases of each picture."""
ABSENT: Final = 0.15
"""Chance that one names something that is not there."""
POOLED: Final = {48: 1500, SIDE: 500}
"""Pictures to draw from, by side."""
FRESH: Final = {48: 6, SIDE: 2}
"""How many of them each step renders again."""
SHRUNK: Final = {48: 2, SIDE: 3}
"""Up to how many times larger pictures are drawn, before they are scaled down; each as often as the others."""
RATES: Final = (4e-3, 2e-3)
"""Greatest learning rates of Muon and of AdamW."""
SMOOTH: Final = 16.0
"""Pixels; what a mask is not told apart from none by, in Dice's loss."""
NAMES_WEIGHT: Final = 0.5
PRODUCTS: Final = "products"
"""Name of `products` among the attentions of transformers."""


@dataclass(frozen=True)
class SegmenterBatch:
    """Pictures, what they are asked, and the answers."""

    pixels: torch.Tensor
    """(scenes, 3, side, side), normalised as the processor does."""
    ids: torch.Tensor
    """(scenes * ASKED, tokens), all phrases of the first scene first."""
    masks: torch.Tensor
    """(scenes * ASKED, side, side), 1 where meant."""
    names: tuple[torch.Tensor, torch.Tensor]
    """(scenes, tokens, kinds + 1) each: parts of a token's pixels by colour and by shape; first the ground."""


class SegmenterTrainingModel(nn.Module):
    """The model that ships, and the head that helps it learn."""

    def __init__(self) -> None:
        super().__init__()
        self.model: CLIPSegForImageSegmentation = clipseg.segmenter()
        for layer in [*self.model.clip.vision_model.encoder.layers, *self.model.decoder.layers]:
            layer.self_attn.config._attn_implementation = PRODUCTS  # noqa: SLF001 - a decoder's own configuration has no setter
        self.names = nn.Linear(clipseg.WIDTH, 2 + len(NAMES) + len(SHAPES))

    def forward(
        self, pixels: torch.Tensor, ids: torch.Tensor, corner: tuple[int, int] = (0, 0)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of masks (phrases, side, side), and of names (scenes, tokens, both kinds).

        As the model computes, but that its own forward lets no gradient into the encoders.

        Args:
            pixels: (scenes, 3, side, side).
            ids: (phrases, tokens), equally many of each scene.
            corner: row and column of the position embedding where a picture smaller than the model's begins.
        """
        clip: Any = self.model.clip
        hidden = clip.vision_model.pre_layrnorm(self._embedded(pixels, corner))
        outputs = []
        for layer in clip.vision_model.encoder.layers:
            hidden = layer(hidden, None)
            outputs.append(hidden)
        asked = len(ids) // len(pixels)
        taken = [outputs[i].repeat_interleave(asked, dim=0) for i in TAKEN]
        told = clip.get_text_features(ids).pooler_output
        return self.model.decoder(taken, told).logits, self.names(outputs[TAKEN[-1]][:, 1:])

    def _embedded(self, pixels: torch.Tensor, corner: tuple[int, int]) -> torch.Tensor:
        """(scenes, 1 + tokens, width)."""
        seen: Any = self.model.clip.vision_model.embeddings
        tokens = seen.patch_embedding(pixels).flatten(2).mT
        side, (row, column) = pixels.shape[-1] // PATCH, corner
        first, places = seen.position_embedding.weight.split([1, GRID**2])
        window = places.view(GRID, GRID, -1)[row : row + side, column : column + side].flatten(0, 1)
        start = (seen.class_embedding + first).expand(len(pixels), 1, -1)
        return torch.cat([start, tokens + window], dim=1)


def products(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - the encoder of pictures and the decoder have none
    scaling: float,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by two products.

    From (rows, heads, tokens, width of a head) to (rows, tokens, heads, width of a head), as transformers asks. The
    backward of torch's fused attention takes up to twice as long on a CPU at these sizes.
    """
    weights = torch.softmax((query * scaling) @ key.mT, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(PRODUCTS, products)


class NamedScenePool:
    """Scenes of one size that batches are drawn from; a few are rendered again each step."""

    def __init__(self, side: int, seed: int, first: int) -> None:
        """Render `POOLED` scenes, the `first` that training has not seen and those after it."""
        self._side, self._seed, self._rendered = side, seed, first
        self._scenes = [self._next() for _ in range(POOLED[side])]

    def refresh(self) -> None:
        """Replace the oldest scenes."""
        self._scenes = self._scenes[FRESH[self._side] :] + [self._next() for _ in range(FRESH[self._side])]

    def draw(self, rng: np.random.Generator, count: int) -> list[NamedScene]:
        """So many of them."""
        return [self._scenes[i] for i in rng.integers(len(self._scenes), size=count)]

    def _next(self) -> NamedScene:
        index, self._rendered = self._rendered, self._rendered + 1
        rng = np.random.default_rng((self._seed, self._side, index))
        return sample(rng, self._side, 1 + index % SHRUNK[self._side])


def run(plan: StagePlan) -> None:
    """Train, going on from ``segmenter.pt`` in the plan's folder."""
    torch.manual_seed(plan.seed)
    lesson = SegmenterTrainingModel().to(plan.device)
    tokenizer = clipseg.tokenizer()
    weights = optimisers(lesson, lambda name, each: ".layers." in name and each.ndim == 2, RATES)
    loop = TrainingLoop(TITLE, plan, lesson, weights, RATES)
    first = loop.step
    pools: dict[int, NamedScenePool] = {}

    def loss_of(step: int) -> Losses:
        rng = np.random.default_rng((plan.seed, step))
        side, count = next((side, count) for until, side, count in BATCHES if step / plan.steps < until)
        if side not in pools:
            pools[side] = NamedScenePool(side, plan.seed, POOLED[side] + step * FRESH[side] if first else 0)
        pools[side].refresh()
        batch = asked(rng, pools[side].draw(rng, count), tokenizer)
        row, column = rng.integers(GRID - side // PATCH + 1, size=2)
        logits, names = lesson(batch.pixels, batch.ids, (int(row), int(column)))
        return losses(logits, names, batch)

    loop.run(loss_of, lambda step: cosine(step, plan.steps))


def asked(rng: np.random.Generator, scenes: list[NamedScene], tokenizer: Any) -> SegmenterBatch:
    """`scenes`, half of them mirrored, with `ASKED` phrases each."""
    scenes = [mirrored(scene) if rng.uniform() < 0.5 else scene for scene in scenes]
    drawn = [(scene, _phrase(rng, scene)) for scene in scenes for _ in range(ASKED)]
    masks = np.stack([phrases.mask_of(scene, phrase) for scene, phrase in drawn])
    pixels = torch.from_numpy(np.stack([scene.picture for scene in scenes])).permute(0, 3, 1, 2).float() / 255
    read = tokenizer([phrase.text for _, phrase in drawn], padding=True, return_tensors="pt")
    return SegmenterBatch(
        (pixels - clipseg.PIXEL_MEAN) / clipseg.PIXEL_DEVIATION,
        read.input_ids,
        torch.from_numpy(masks).float(),
        (
            _parts(np.stack([scene.colours for scene in scenes]), len(NAMES)),
            _parts(np.stack([scene.shapes for scene in scenes]), len(SHAPES)),
        ),
    )


def mirrored(scene: NamedScene) -> NamedScene:
    """Left and right exchanged: every shape is the same shape then."""
    return NamedScene(
        scene.picture[:, ::-1].copy(), scene.colours[:, ::-1].copy(), scene.shapes[:, ::-1].copy()
    )


def _phrase(rng: np.random.Generator, scene: NamedScene) -> phrases.Phrase:
    kind = phrases.PhraseKind(rng.choice(list(phrases.CHANCES), p=list(phrases.CHANCES.values())))
    absent = kind in phrases.NAMING and rng.uniform() < ABSENT
    return phrases.draw(rng, scene, kind, absent=bool(absent))


def _parts(maps: np.ndarray[Any, np.dtype[np.int8]], kinds: int) -> torch.Tensor:
    """(scenes, tokens, kinds + 1) of maps (scenes, side, side) that hold `GROUND` or a kind."""
    one_hot = nn.functional.one_hot(torch.from_numpy(maps).long() - GROUND, kinds + 1)
    parts = nn.functional.avg_pool2d(one_hot.permute(0, 3, 1, 2).float(), PATCH)
    return parts.flatten(2).mT


def losses(logits: torch.Tensor, names: torch.Tensor, batch: SegmenterBatch) -> Losses:
    """Cross-entropy of pixels, Dice's of masks (Milletari et al., 2016), and cross-entropy of names."""
    pixels = nn.functional.binary_cross_entropy_with_logits(logits, batch.masks)
    found, meant = logits.sigmoid().flatten(1), batch.masks.flatten(1)
    common = 2 * (found * meant).sum(1) + SMOOTH
    dice = (1 - common / (found.sum(1) + meant.sum(1) + SMOOTH)).mean()
    told = zip(torch.split(names, [len(NAMES) + 1, len(SHAPES) + 1], dim=-1), batch.names, strict=True)
    kinds = torch.stack(
        [nn.functional.cross_entropy(a.flatten(0, 1), b.flatten(0, 1)) for a, b in told]
    ).sum()
    return {"loss": pixels + dice + NAMES_WEIGHT * kinds, "pixels": pixels, "dice": dice, "names": kinds}
