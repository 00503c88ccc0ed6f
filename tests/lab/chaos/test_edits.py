"""The edits of a chaos run, and what is found wrong with pictures."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from giornata_lab.rehearsals.chaos.edits import (
    HEIGHT,
    VARIANTS,
    WIDTH,
    Door,
    Pixels,
    edits,
    flaw,
    pixels,
    variants,
)

VARIANT = variants()[3]


def file(painted: Pixels) -> bytes:
    data = io.BytesIO()
    Image.fromarray(painted).save(data, "PNG")
    return data.getvalue()


def repainted(value: int = 9) -> Pixels:
    painted = VARIANT.original.copy()
    painted[VARIANT.repainted] = value
    return painted


def test_edits_have_keys_of_their_own_and_come_through_both_doors() -> None:
    asked = edits(1, 200)
    assert len({edit.job_id for edit in asked}) == len({edit.key for edit in asked}) == 200
    assert {edit.door for edit in asked} == set(Door)
    assert {edit.variant for edit in asked} == set(range(VARIANTS))
    assert asked == edits(1, 200)
    assert {edit.key for edit in asked}.isdisjoint(edit.key for edit in edits(2, 200))


def test_some_variants_reuse_and_some_ask_for_several_pictures() -> None:
    made = variants()
    assert {variant.reproducible for variant in made} == {True, False}
    assert {variant.pictures for variant in made} == {1, 2}
    assert all(variant.original.shape == (HEIGHT, WIDTH, 3) for variant in made)
    assert all(0 < variant.repainted.mean() < 0.6 for variant in made)


def test_a_picture_that_is_repainted_in_its_mask_is_right() -> None:
    assert flaw(VARIANT, file(repainted()), None) is None
    assert flaw(VARIANT, file(repainted()), repainted(10)) is None
    assert np.array_equal(pixels(file(repainted())), repainted())


@pytest.mark.parametrize(
    ("picture", "reference", "what"),
    [
        (b"no picture", None, "no picture"),
        (file(repainted()[:-8]), None, "shape"),
        (file(np.full_like(VARIANT.original, 9)), None, "outside the mask"),
        (file(repainted(9)), repainted(19), "differs by 10"),
    ],
)
def test_what_is_wrong_with_a_picture_is_said(picture: bytes, reference: Pixels | None, what: str) -> None:
    assert what in (flaw(VARIANT, picture, reference) or "")
