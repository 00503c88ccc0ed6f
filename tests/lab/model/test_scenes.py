"""The procedural scenes: what training and measuring rely on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.model.scenes import COLOURS, GROUNDS, SHAPES, SceneTask, sample
from giornata_lab.model.scenes.scene import PLURALS, REMOVE, add_caption, words
from giornata_lab.model.scenes.shapes import (
    CONTRAST,
    RATIO_QUANTILES,
    RING_HOLE,
    SceneShape,
    box,
    brush,
    coverage,
    ellipse,
    ground_colour,
    outline,
    ratio,
    rgb,
)

SIDES = (48, 128, 256)


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(seed=st.integers(0, 10**6), side=st.sampled_from(SIDES), task=st.sampled_from(list(SceneTask)))
def test_a_scene_changes_only_inside_its_mask(seed: int, side: int, task: SceneTask) -> None:
    scene = sample(rng(seed), side, task, clear=True)
    assert scene.before.shape == scene.after.shape == (side, side, 3)
    assert scene.mask.shape == (side, side)
    changed = (scene.before != scene.after).any(axis=2)
    if task is SceneTask.EMPTY:
        assert not scene.mask.any()
        assert not changed.any()
        assert scene.caption == ""
    elif task is not SceneTask.ADD_SEVERAL:
        outside = changed & ~scene.mask
        assert outside.sum() <= 0.03 * changed.sum(), "a tip may stick out of an ellipse or a stroke, no more"


@given(seed=st.integers(0, 10**6), side=st.sampled_from(SIDES))
def test_equal_seeds_give_equal_scenes(seed: int, side: int) -> None:
    one, other = sample(rng(seed), side), sample(rng(seed), side)
    assert one.caption == other.caption
    assert one.asked == other.asked
    for mine, theirs in ((one.before, other.before), (one.after, other.after), (one.mask, other.mask)):
        np.testing.assert_array_equal(mine, theirs)


def test_a_caption_names_what_is_in_the_mask() -> None:
    for seed in range(200):
        scene = sample(rng(3, seed), 64)
        said = scene.caption.replace("grey", "gray").split()
        if scene.task is SceneTask.ADD:
            (thing,) = scene.asked
            assert thing.colour in said
            assert thing.shape in said
        if scene.task is SceneTask.ADD_SEVERAL:
            for thing in scene.asked:
                assert thing.colour in said
                assert {thing.shape, PLURALS[thing.shape]} & set(said)
        if scene.task is SceneTask.REMOVE:
            assert scene.caption in REMOVE


def test_everything_that_can_be_asked_for_is_drawn() -> None:
    scenes = [sample(rng(5, seed), 64) for seed in range(600)]
    asked = [thing for scene in scenes for thing in scene.asked]
    assert {thing.shape for thing in asked} == set(SHAPES)
    assert {thing.colour for thing in asked} == set(COLOURS)
    assert {scene.ground for scene in scenes} == set(GROUNDS)
    assert {scene.task for scene in scenes} == set(SceneTask)


def test_every_word_of_a_caption_is_known() -> None:
    known = set(words())
    for seed in range(400):
        assert set(sample(rng(7, seed), 48).caption.split()) <= known


@pytest.mark.parametrize(
    ("things", "said"),
    [
        ([("blue", "square")] * 2, "two blue squares"),
        ([("red", "star"), ("white", "cross")], "a red star and a white cross"),
        ([("orange", "cross"), ("teal", "ring")], "an orange cross and a teal ring"),
        ([("pink", "heart")] * 3, "three pink hearts"),
    ],
)
def test_several_things_are_counted(things: list[tuple[str, str]], said: str) -> None:
    captions = {add_caption(rng(seed), things) for seed in range(40)}
    assert said in captions
    assert all(said in caption for caption in captions)


def test_areas_of_shapes_are_those_of_geometry() -> None:
    radius = 80.0
    areas = {
        shape: float(coverage(SceneShape(shape, "red", 128, 128, radius, 0), 256).alpha.sum()) / radius**2
        for shape in SHAPES
    }
    assert areas["circle"] == pytest.approx(np.pi, rel=0.02)
    assert areas["ring"] == pytest.approx(np.pi * (1 - RING_HOLE**2), rel=0.03)
    assert areas["square"] == pytest.approx(2 * 1.22**2, rel=0.02)
    assert areas["triangle"] == pytest.approx(1.15**2 * 3**1.5 / 4, rel=0.02)
    for shape in ("star", "diamond", "cross", "heart"):
        corners = outline(shape).rim
        x, y = corners.T
        shoelace = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
        assert areas[shape] == pytest.approx(shoelace, rel=0.03)


@given(x=st.floats(-60, 120), y=st.floats(-60, 120), radius=st.floats(1, 50), shape=st.sampled_from(SHAPES))
def test_what_lies_beyond_the_canvas_is_cut_off(x: float, y: float, radius: float, shape: str) -> None:
    cover = coverage(SceneShape(shape, "red", x, y, radius, 3.0), 64)
    height, width = cover.alpha.shape
    assert 0 <= cover.left <= 64 - width
    assert 0 <= cover.top <= 64 - height
    assert cover.alpha.size == 0 or 0 <= cover.alpha.min() <= cover.alpha.max() <= 1


def test_mask_ratios_follow_the_production_quantiles() -> None:
    drawn = np.array([ratio(rng(11, seed)) for seed in range(4000)])
    deciles = np.quantile(drawn, np.linspace(0, 1, 11))
    np.testing.assert_allclose(deciles[1:-1], RATIO_QUANTILES[1:-1], rtol=0.08)
    assert drawn.mean() == pytest.approx(0.112, abs=0.012), "the mean of the production templates"


def test_masks_have_their_shapes() -> None:
    assert box(64, 32, 32, 10, 6).sum() == 20 * 12
    assert ellipse(256, 128, 128, 100, 60).sum() == pytest.approx(np.pi * 100 * 60, rel=0.01)
    for seed in range(30):
        strokes = brush(rng(13, seed), 128, 64, 64, 30)
        disc = ellipse(128, 64, 64, 0.8 * 30, 0.8 * 30)
        assert (strokes & disc).sum() >= 0.97 * disc.sum(), "the strokes together cover the disc"


def test_grounds_keep_away_from_the_colours_on_them() -> None:
    for seed in range(100):
        avoided = [rgb(name) for name in rng(17, seed).choice(list(COLOURS), 2, replace=False)]
        colour = ground_colour(rng(19, seed), avoided)
        assert min(float(np.linalg.norm(colour - other)) for other in avoided) >= CONTRAST
