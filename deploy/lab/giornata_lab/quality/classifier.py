"""A small classifier of what lies in a mask; its features feed the Fréchet distance. It decides no gate.

``python -m giornata_lab.quality.classifier`` trains it on scenes of its own, in some minutes on one CPU thread; its
weights lie here. Equal seeds and equal versions give equal weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import nn

from giornata_lab.model.scenes import COLOURS, SHAPES, SceneTask, sample
from giornata_lab.model.scenes.shapes import Mask
from giornata_lab.quality.metrics import Features, Pixels

WEIGHTS: Final = Path(__file__).with_name("classifier.safetensors")
CROP: Final = 48
"""Side of what the classifier sees, in pixels."""
SURROUND: Final = 0.15
"""Share of the mask's box that is added on every side."""
PLACES: Final = 3
"""Parts of each axis over which means are taken."""
FEATURES: Final = 32
CLASSES: Final = (len(COLOURS) + 1, len(SHAPES) + 1)
"""Colours and shapes; the last of each is none."""
BATCH: Final = 128

ENTROPY: Final = 0x434C4153
"""First word of every scene's seed: neither the painter's training nor the evaluation draws these."""
SIDE: Final = 128
LEAST_MASK_PX: Final = 32.0
TRAINING_BATCH: Final = 64
LEARNING_RATE: Final = 3e-3
LABEL_SMOOTHING: Final = 0.05
HELD_OUT: Final = 512
"""Scenes that are only tested on."""

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Crops (n, CROP, CROP, 3), and labels (n, 2) of colour and shape."""


class Classifier(nn.Module):
    """Four convolutions, a mean over places, `FEATURES` numbers, and from those a colour and a shape."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 48, 64)
        self.trunk = nn.Sequential(
            *(
                layer
                for i, (one, next_) in enumerate(pairwise(widths))
                for layer in (nn.Conv2d(one, next_, 3, 2 if i else 1, 1), nn.GroupNorm(8, next_), nn.SiLU())
            )
        )
        self.features = nn.Linear(widths[-1] * PLACES**2, FEATURES)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, n) for n in CLASSES)

    def embed(self, crops: torch.Tensor) -> torch.Tensor:
        """(n, FEATURES) of crops (n, 3, CROP, CROP) in [-1, 1]."""
        places = nn.functional.avg_pool2d(self.trunk(crops), CROP // 8 // PLACES)
        embedded: torch.Tensor = self.features(places.flatten(1))
        return embedded

    def forward(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of colour and shape, (n, classes) each."""
        embedded = nn.functional.silu(self.embed(crops))
        colour, shape = (head(embedded) for head in self.heads)
        return colour, shape


def load(weights: Path = WEIGHTS) -> Classifier:
    """The trained classifier, on the CPU, float32."""
    classifier = Classifier()
    classifier.load_state_dict(load_file(weights))
    return classifier.eval()


def crop(picture: Pixels, mask: Mask) -> Pixels:
    """(CROP, CROP, 3): the mask's box with some of its surroundings, cut off at the picture's edge."""
    spans = []
    for axis in (0, 1):
        inside = np.flatnonzero(mask.any(1 - axis))
        first, last = int(inside[0]), int(inside[-1]) + 1
        more = round(SURROUND * (last - first))
        spans.append((max(first - more, 0), min(last + more, mask.shape[axis])))
    (top, bottom), (left, right) = spans
    seen = Image.fromarray(picture).resize((CROP, CROP), Image.Resampling.BOX, (left, top, right, bottom))
    return np.asarray(seen)


def embed(classifier: Classifier, pictures: Iterable[tuple[Pixels, Mask]]) -> Features:
    """(pictures, FEATURES) float64 of what lies in the masks."""
    crops = np.stack([crop(picture, mask) for picture, mask in pictures])
    with torch.inference_mode():
        parts = [classifier.embed(to_tensor(crops[i : i + BATCH])) for i in range(0, len(crops), BATCH)]
        return torch.cat(parts).double().numpy()


def to_tensor(crops: NDArray[np.uint8]) -> torch.Tensor:
    """(n, CROP, CROP, 3) uint8 as (n, 3, CROP, CROP) float32 in [-1, 1]."""
    return torch.from_numpy(crops).permute(0, 3, 1, 2).float() / 127.5 - 1


def examples(count: int, seed: int) -> Examples:
    """`count` scenes: two pictures each, with the thing (its colour and shape) and without (none)."""
    crops = np.empty((2 * count, CROP, CROP, 3), np.uint8)
    labels = np.empty((2 * count, 2), np.int64)
    colours = list(COLOURS)
    for i in track(range(count), "scenes"):
        rng = np.random.default_rng((ENTROPY, seed, i))
        scene = sample(rng, SIDE, SceneTask.ADD, LEAST_MASK_PX, clear=True)
        (thing,) = scene.asked
        crops[2 * i], crops[2 * i + 1] = crop(scene.after, scene.mask), crop(scene.before, scene.mask)
        labels[2 * i] = colours.index(thing.colour), SHAPES.index(thing.shape)
        labels[2 * i + 1] = CLASSES[0] - 1, CLASSES[1] - 1
    return crops, labels


def train(learned: Examples, epochs: int, seed: int) -> Classifier:
    """A classifier that has seen every example `epochs` times."""
    torch.manual_seed(seed)
    classifier = Classifier()
    crops, labels = to_tensor(learned[0]), torch.from_numpy(learned[1])
    steps = epochs * (len(crops) // TRAINING_BATCH)
    optimiser = torch.optim.AdamW(classifier.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
    order = torch.cat([torch.randperm(len(crops))[: steps // epochs * TRAINING_BATCH] for _ in range(epochs)])
    for rows in track(torch.split(order, TRAINING_BATCH), "training"):
        colour, shape = classifier(crops[rows])
        loss = loss_of(colour, labels[rows, 0]) + loss_of(shape, labels[rows, 1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return classifier.eval()


def accuracy(classifier: Classifier, tested: Examples) -> float:
    """Share of the examples whose colour and shape are both right."""
    with torch.inference_mode():
        guesses = [logits.argmax(1).numpy() for logits in classifier(to_tensor(tested[0]))]
    return float((np.stack(guesses, axis=1) == tested[1]).all(1).mean())


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=WEIGHTS, help="File of the weights.")
@click.option("--scenes", type=int, default=6000, help="To learn from.")
@click.option("--epochs", type=int, default=8)
@click.option("--seed", type=int, default=0)
def main(out: Path, scenes: int, epochs: int, seed: int) -> None:
    """Train, test on scenes that were kept apart, and write the weights."""
    torch.set_num_threads(1)
    crops, labels = examples(scenes + HELD_OUT, seed)
    cut = 2 * scenes
    classifier = train((crops[:cut], labels[:cut]), epochs, seed)
    save_file(classifier.state_dict(), out)
    size = out.stat().st_size
    right = accuracy(classifier, (crops[cut:], labels[cut:]))
    Console().print(f"{out}: {size} bytes; colour and shape both right on {right:.1%} of held-out pictures.")


if __name__ == "__main__":
    main()
