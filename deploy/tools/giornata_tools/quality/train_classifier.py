"""Trains the classifier: ``python -m giornata_tools.quality.train_classifier``. Some minutes on one CPU thread.

Equal seeds and equal versions give equal weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import nn

from giornata_tools.model.scenes import COLOURS, SHAPES, Task, sample
from giornata_tools.quality.classifier import CLASSES, CROP, WEIGHTS, Classifier, crop, to_tensor

ENTROPY: Final = 0x434C4153
"""First word of every scene's seed: neither the painter's training nor the evaluation draws these."""
SIDE: Final = 128
LEAST_MASK_PX: Final = 32.0
BATCH: Final = 64
LEARNING_RATE: Final = 3e-3
LABEL_SMOOTHING: Final = 0.05
HELD_OUT: Final = 512
"""Scenes that are only tested on."""

Examples = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Crops (n, CROP, CROP, 3), and labels (n, 2) of colour and shape."""


def examples(count: int, seed: int) -> Examples:
    """`count` scenes: two pictures each, with the thing (its colour and shape) and without (none)."""
    crops = np.empty((2 * count, CROP, CROP, 3), np.uint8)
    labels = np.empty((2 * count, 2), np.int64)
    colours = list(COLOURS)
    for i in track(range(count), "scenes"):
        rng = np.random.default_rng((ENTROPY, seed, i))
        scene = sample(rng, SIDE, Task.ADD, LEAST_MASK_PX, clear=True)
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
    steps = epochs * (len(crops) // BATCH)
    optimiser = torch.optim.AdamW(classifier.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
    order = torch.cat([torch.randperm(len(crops))[: steps // epochs * BATCH] for _ in range(epochs)])
    for rows in track(torch.split(order, BATCH), "training"):
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
