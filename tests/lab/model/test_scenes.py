"""The procedural scenes: what training and measuring rely on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.model.scenes import SceneTask, sample
from giornata_lab.model.scenes.scene import PLURALS, REMOVE

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
