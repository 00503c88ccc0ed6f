"""What sinopia learns from: scenes whose things are known by pixel, phrases, and its lesson."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from giornata_lab.model.scenes import COLOURS, SHAPES
from giornata_lab.model.scenes.scene import PLURALS
from giornata_lab.model.scenes.shapes import SceneShape, coverage, overlap
from giornata_lab.model.segmenter import architecture, scenes
from giornata_lab.model.segmenter.scenes import (
    GROUND,
    NAMES,
    NAMING,
    NamedScene,
    Phrase,
    PhraseKind,
    held_out,
    sample,
    seen,
)
from giornata_lab.model.train import segmenter
from giornata_lab.model.train.segmenter import SegmenterTrainingModel


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(seed=st.integers(0, 10**6), side=st.sampled_from((64, 128)), shrunk=st.sampled_from((1, 2)))
def test_what_a_scene_names_has_its_colour(seed: int, side: int, shrunk: int) -> None:
    scene = sample(rng(seed), side, shrunk)
    assert scene.picture.shape == (side, side, 3)
    assert scene.colours.shape == scene.shapes.shape == (side, side)
    np.testing.assert_array_equal(scene.colours == GROUND, scene.shapes == GROUND)
    for colour, _ in scene.kinds:
        inside = ndimage.binary_erosion(scene.colours == NAMES.index(colour), iterations=2)
        if inside.any():
            mean = scene.picture[inside].mean(0)
            distances = {name: np.linalg.norm(mean - other) for name, other in COLOURS.items()}
            assert distances[colour] < 45, "shading, and a colour that varies a little"


def test_equal_seeds_give_equal_scenes_and_no_scene_for_measuring_is_trained_on() -> None:
    one, again = (held_out(64, 3) for _ in range(2))
    for mine, theirs in zip(one, again, strict=True):
        np.testing.assert_array_equal(mine.picture, theirs.picture)
        np.testing.assert_array_equal(mine.shapes, theirs.shapes)
    trained = {sample(rng(0, 64, index), 64).picture.tobytes() for index in range(40)}
    assert len(trained) == 40
    assert not trained & {scene.picture.tobytes() for scene in one}


def test_a_thing_is_seen_where_nothing_lies_on_it() -> None:
    below, above = SceneShape("circle", "red", 30, 30, 20, 0), SceneShape("square", "blue", 44, 30, 10, 0)
    colours, shapes = seen([below, above], 64)
    assert (colours[30, 44], shapes[30, 44]) == (NAMES.index("blue"), SHAPES.index("square"))
    assert (colours[30, 20], shapes[30, 20]) == (NAMES.index("red"), SHAPES.index("circle"))
    assert colours[5, 5] == GROUND
    assert (colours == NAMES.index("blue")).sum() == (coverage(above, 64).alpha >= 0.5).sum()


def test_a_scene_that_is_scaled_down_is_the_same_scene() -> None:
    for seed in range(5):
        large, small = sample(rng(seed), 128), sample(rng(seed), 64, 2)
        assert large.kinds == small.kinds
        reduced = (large.colours != GROUND).reshape(64, 2, 64, 2).mean((1, 3)) >= 0.5
        assert overlap(reduced, small.colours != GROUND) > 0.85


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(list(PhraseKind)))
def test_a_phrase_means_what_it_says(seed: int, kind: PhraseKind) -> None:
    scene = sample(rng(seed), 64)
    phrase = scenes.draw(rng(seed, 1), scene, kind)
    mask = scenes.mask_of(scene, phrase)
    assert mask.any()
    said = phrase.text.replace("grey", "gray").split()
    assert set(phrase.text.split()) <= set(scenes.words())
    assert (phrase.colour is not None) == (kind in {PhraseKind.NAMED, PhraseKind.COLOUR})
    if phrase.colour is not None:
        assert phrase.colour in said
        assert {NAMES[i] for i in scene.colours[mask]} == {phrase.colour}
    if phrase.shape is not None:
        assert {phrase.shape, PLURALS[phrase.shape]} & set(said)
        assert {SHAPES[i] for i in scene.shapes[mask]} == {phrase.shape}
    assert (scene.colours[mask] == GROUND).all() == (kind is PhraseKind.BACKGROUND)


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(NAMING))
def test_what_is_absent_is_nowhere(seed: int, kind: PhraseKind) -> None:
    scene = sample(rng(seed), 64)
    phrase = scenes.draw(rng(seed, 1), scene, kind, absent=True)
    assert not scenes.mask_of(scene, phrase).any()


def test_the_red_circle_is_every_red_circle_and_no_other_thing() -> None:
    things = [
        SceneShape(shape, colour, x, 32, 8, 0)
        for x, (colour, shape) in zip(
            (10, 32, 54), [("red", "circle"), ("blue", "circle"), ("red", "circle")], strict=True
        )
    ]
    scene = NamedScene(np.zeros((64, 64, 3), np.uint8), *seen(things, 64))
    mask = scenes.mask_of(scene, Phrase("the red circle", PhraseKind.NAMED, "red", "circle"))
    assert (mask[32, 10], mask[32, 32], mask[32, 54]) == (True, False, True)
    every = scenes.mask_of(scene, Phrase("circles", PhraseKind.SHAPE, None, "circle"))
    assert every.sum() == 3 * mask.sum() / 2


def test_every_word_is_one_token() -> None:
    tokenizer = architecture.tokenizer()
    for word in scenes.words():
        assert len(tokenizer(word).input_ids) == 3, word  # and both ends
    assert tokenizer("The RED circle").input_ids == tokenizer("the red circle").input_ids


def test_the_lesson_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    lesson = SegmenterTrainingModel().eval()
    batch = segmenter.asked(rng(3), held_out(architecture.SIDE, 2), architecture.tokenizer())
    with torch.inference_mode():
        logits, names = lesson(batch.pixels, batch.ids)
        repeated = batch.pixels.repeat_interleave(segmenter.ASKED, dim=0)
        expected = lesson.model(input_ids=batch.ids, pixel_values=repeated).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert logits.shape == batch.masks.shape
    assert names.shape[:2] == (2, architecture.GRID**2)


def test_products_are_the_same_attention() -> None:
    torch.manual_seed(0)
    lesson = SegmenterTrainingModel().eval()
    batch = segmenter.asked(rng(3), held_out(64, 2), architecture.tokenizer())
    layers = [*lesson.model.clip.vision_model.encoder.layers, *lesson.model.decoder.layers]
    found = []
    for attention in (segmenter.PRODUCTS, "sdpa"):
        for layer in layers:
            layer.self_attn.config._attn_implementation = attention
        with torch.inference_mode():
            found.append(lesson(batch.pixels, batch.ids)[0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_a_small_picture_takes_a_window_of_the_places() -> None:
    torch.manual_seed(0)
    lesson = SegmenterTrainingModel().eval()
    pixels = torch.zeros(1, 3, architecture.SIDE, architecture.SIDE)
    with torch.inference_mode():
        whole = lesson._embedded(pixels, (0, 0))[0, 1:].view(architecture.GRID, architecture.GRID, -1)
        part = lesson._embedded(pixels[..., :64, :64], (3, 7))[0, 1:].view(16, 16, -1)
    torch.testing.assert_close(part, whole[3:19, 7:23], rtol=0, atol=0)


def test_targets_of_names_are_parts_of_tokens() -> None:
    scene = held_out(64, 1)[0]
    batch = segmenter.asked(rng(1), [scene], architecture.tokenizer())
    for parts, maps in zip(batch.names, (scene.colours, scene.shapes), strict=True):
        torch.testing.assert_close(parts.sum(-1), torch.ones_like(parts[..., 0]))
        counts = Counter(maps.flatten().tolist())
        for kind, count in counts.items():
            assert float(parts[0, :, kind + 1].sum()) * architecture.PATCH**2 == pytest.approx(count)


def test_a_perfect_answer_costs_nothing_and_its_opposite_much() -> None:
    batch = segmenter.asked(rng(2), held_out(64, 2), architecture.tokenizer())
    names = torch.cat([parts.clamp_min(1e-9).log() for parts in batch.names], dim=-1)
    right = segmenter.losses(40 * (batch.masks - 0.5), names, batch)
    wrong = segmenter.losses(-40 * (batch.masks - 0.5), names, batch)
    assert float(right["pixels"] + right["dice"]) == pytest.approx(0, abs=1e-3)
    assert float(wrong["pixels"]) > 10
    assert float(wrong["dice"]) > 0.9


def test_overlap_is_intersection_over_union() -> None:
    one, other, none = np.zeros((3, 4, 4), bool)
    one[:2], other[1:3] = True, True
    assert overlap(one, other) == pytest.approx(4 / 12)
    assert (overlap(none, none), overlap(one, none)) == (1, 0)
