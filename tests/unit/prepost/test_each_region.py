"""Regions that are painted one by one: measured and pasted as edits of their crops would be, one after the other."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from giornata.wire.errors import MaskEmpty, SizeMismatch
from giornata_prepost.images.stages import finish, finish_regions, inspect, inspect_regions
from tests.unit.prepost.test_inspection import LIMITS, SCENE, asked, box, card, file

FILE = file(SCENE)
REGIONS = [box(top=10, left=20, bottom=50, right=60), box(top=90, left=150, bottom=120, right=200)]


def shown(data: bytes) -> Any:
    return np.asarray(Image.open(BytesIO(data)))


def painted(height: int, width: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("fields", [{}, {"grow_mask": 3, "mask_blur": 2.0}, {"size": "480x320"}])
def test_one_region_is_an_edit_of_its_crop(fields: dict[str, Any]) -> None:
    parameters = asked(padding_mask_crop=8, **fields)
    edit = inspect(FILE, REGIONS[0], parameters, card(), LIMITS)
    alone = inspect_regions(FILE, REGIONS[:1], parameters, card(), LIMITS)
    assert alone.measures.crops == (edit.measures.crop,)
    for name in (
        "width",
        "model_width",
        "model_height",
        "output_width",
        "tokens",
        "compute_tokens",
        "mask_ratio",
    ):
        assert getattr(alone.measures, name) == getattr(edit.measures, name), name
    ours, theirs = load(alone.prepared), load(edit.prepared)
    assert np.array_equal(ours["image_0"], theirs["image"])
    assert np.array_equal(ours["mask_0"], theirs["mask"])
    picture = painted(edit.measures.model_height, edit.measures.model_width, 1)
    if "size" not in fields:
        pasted = finish_regions(FILE, alone.alpha, parameters, LIMITS, [picture], alone.measures.crops)
        assert pasted == finish(FILE, edit.alpha, parameters, LIMITS, picture, edit.measures.crop)


def test_several_regions_are_edits_one_after_the_other() -> None:
    parameters = asked(padding_mask_crop=8)
    found = inspect_regions(FILE, REGIONS, parameters, card(), LIMITS)
    pictures = [painted(found.measures.model_height, found.measures.model_width, seed) for seed in range(2)]
    expected = FILE
    for region, picture in zip(REGIONS, pictures, strict=True):
        edit = inspect(expected, region, parameters, card(), LIMITS)
        assert edit.measures.model_width == found.measures.model_width
        assert edit.measures.model_height == found.measures.model_height
        expected = finish(expected, edit.alpha, parameters, LIMITS, picture, edit.measures.crop)
    pasted = shown(finish_regions(FILE, found.alpha, parameters, LIMITS, pictures, found.measures.crops))
    assert np.array_equal(pasted, shown(expected))
    outside = (shown(REGIONS[0]) | shown(REGIONS[1])) == 0
    assert np.array_equal(pasted[outside], SCENE[outside])
    assert found.measures.template_key == ""
    assert found.measures.compute_set is None
    assert found.measures.compute_tokens / (2 * found.measures.tokens) == pytest.approx(
        found.measures.mask_ratio
    )


def test_another_output_size_is_resized_to_once() -> None:
    parameters = asked(padding_mask_crop=8, size="480x320")
    found = inspect_regions(FILE, REGIONS, parameters, card(), LIMITS)
    pictures = [painted(found.measures.model_height, found.measures.model_width, seed) for seed in range(2)]
    whole = asked(padding_mask_crop=8)
    small = finish_regions(FILE, found.alpha, whole, LIMITS, pictures, found.measures.crops)
    large = finish_regions(FILE, found.alpha, parameters, LIMITS, pictures, found.measures.crops)
    expected = Image.open(BytesIO(small)).resize((480, 320), Image.Resampling.LANCZOS)
    assert np.array_equal(shown(large), np.asarray(expected))


def test_bad_regions_and_sizes_are_refused_as_those_of_an_edit() -> None:
    with pytest.raises(MaskEmpty):
        inspect_regions(FILE, [file(np.zeros(SCENE.shape[:2], np.uint8))], asked(), card(), LIMITS)
    with pytest.raises(SizeMismatch):
        inspect_regions(FILE, REGIONS, asked(size="100x100"), card(), LIMITS)
