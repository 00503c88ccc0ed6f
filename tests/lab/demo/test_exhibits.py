"""The studio's samples are what the scenes module renders, and ask for what the built-in model knows."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from giornata_lab.demo.exhibits import FOLDER, PHOTOGRAPH_PADDING, PLACES, SCENES, by_words, drawn, exhibits
from giornata_lab.model.scenes.scene import words

drawn_once = cache(drawn)
SAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "samples.json").read_text("utf-8"))["samples"]


def entry(file: str) -> dict[str, Any]:
    (found,) = [one for one in SAMPLES if one["file"] == file]
    return found


def test_every_file_that_the_script_draws_is_shipped_as_it_draws_it() -> None:
    pictures = drawn_once()
    assert {f"{name}-mask.png" for name in (*SCENES, "words", *PLACES)} == {one["mask"] for one in SAMPLES}
    for name, picture in pictures.items():
        with Image.open(FOLDER / name) as shipped:
            assert (shipped.mode, shipped.size) == (picture.mode, picture.size)
            difference = np.abs(np.asarray(shipped).astype(int) - np.asarray(picture))
        assert difference.max() <= 1, f"{name} differs: run python -m giornata_lab.demo.exhibits"


def test_the_page_shows_the_scenes_of_the_demo() -> None:
    shown = {exhibit.name: exhibit for exhibit in exhibits()}
    pictures = drawn_once()
    for name in SCENES:
        assert pictures[f"{name}.png"].tobytes() == shown[name].picture.tobytes()
        assert pictures[f"{name}-mask.png"].tobytes() == shown[name].mask.tobytes()
        assert entry(f"{name}.png")["prompt"] == shown[name].parameters.prompt
    named = by_words()
    assert pictures["words.png"].tobytes() == named.picture.tobytes()
    assert entry("words.png")["prompt"] == named.parameters.prompt


@pytest.mark.parametrize("one", SAMPLES, ids=lambda one: one["title"])
def test_a_sample_asks_for_what_the_built_in_model_knows(one: dict[str, Any]) -> None:
    assert set(one["prompt"].split()) <= set(words())
    with Image.open(FOLDER / one["file"]) as picture, Image.open(FOLDER / one["mask"]) as mask:
        assert mask.size == picture.size
        masked = np.asarray(mask) / 255
        pixels = np.asarray(picture).astype(float)[masked > 0]
        photograph = max(picture.size) > 256
    assert 0.005 < masked.mean() < 0.2
    assert one.get("padding_mask_crop") == (PHOTOGRAPH_PADDING if photograph else None), "as in the demo"
    if photograph:
        assert pixels.std(axis=0).mean() < 30, "the place is plain"
