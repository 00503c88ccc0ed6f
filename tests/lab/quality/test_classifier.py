"""The shipped classifier: small, and good enough that its features tell scenes apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from giornata_lab.model.scenes import COLOURS, SHAPES, SceneTask
from giornata_lab.quality import classifier
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_lab.quality.metrics import frechet


@pytest.fixture(scope="module")
def some() -> list[QualityCase]:
    return [draw(slot) for slot in spread([s for s in slots() if s.task is SceneTask.ADD], 64)]


def test_the_weights_are_small() -> None:
    assert classifier.WEIGHTS.stat().st_size < 300_000


def test_it_names_held_out_scenes_and_empty_ones(some: list[QualityCase]) -> None:
    model = classifier.load()
    crops = [classifier.crop(picture, c.scene.mask) for c in some for picture in (c.scene.after, c.bare)]
    with torch.inference_mode():
        colour, shape = (x.argmax(1).tolist() for x in model(classifier.to_tensor(np.stack(crops))))
    wanted = [
        label
        for c in some
        for label in ((list(COLOURS).index(c.slot.colour), SHAPES.index(c.slot.shape)), (12, 8))
    ]
    right = [guess == label for guess, label in zip(zip(colour, shape, strict=True), wanted, strict=True)]
    assert np.mean(right) >= 0.95


def test_its_features_tell_scenes_with_the_thing_from_scenes_without(some: list[QualityCase]) -> None:
    model = classifier.load()
    truths = classifier.embed(model, [(c.scene.after, c.scene.mask) for c in some])
    bare = classifier.embed(model, [(c.bare, c.scene.mask) for c in some])
    assert truths.shape == (len(some), classifier.FEATURES)
    assert frechet(truths, bare) > 10 * frechet(truths[::2], truths[1::2])


def test_a_crop_is_the_masks_box_with_its_surroundings() -> None:
    picture = np.zeros((128, 128, 3), np.uint8)
    picture[40:80, 50:90] = 255
    mask = np.zeros((128, 128), bool)
    mask[40:80, 50:90] = True
    seen = classifier.crop(picture, mask)
    assert seen.shape == (classifier.CROP, classifier.CROP, 3)
    assert (seen[24, 24], seen[0, 0]) == (pytest.approx([255] * 3), pytest.approx([0] * 3))
    assert (seen > 127).mean() == pytest.approx((40 / 52) ** 2, abs=0.05)


def test_a_mask_at_the_edge_is_cut_off_there() -> None:
    picture = np.full((128, 128, 3), 200, np.uint8)
    mask = np.zeros((128, 128), bool)
    mask[:40, 100:] = True
    assert (classifier.crop(picture, mask) == 200).all()
