"""What prompts are compared by, from CLIP's embedding and the prompt's tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from giornata.approximate.entries import embedding_of
from giornata_prepost.prompt_embedding import NUMBERS, Numbers, _signs, embedding


def part(length: int, seed: int) -> Numbers:
    return np.random.default_rng(seed).standard_normal(length)


def cosine(one: bytes | None, other: bytes | None) -> float:
    a, b = embedding_of(one or b""), embedding_of(other or b"")
    assert a is not None
    assert b is not None
    return float(a @ b)


def test_both_parts_have_equal_weight_whatever_their_lengths() -> None:
    pooled, tokens = part(64, 0), part(64, 1)
    other = np.roll(tokens, 1) - tokens * (np.roll(tokens, 1) @ tokens) / (
        tokens @ tokens
    )  # at a right angle
    one = embedding([pooled, tokens])
    assert cosine(one, embedding([100 * pooled, tokens / 7])) == pytest.approx(1, abs=1e-3)
    assert cosine(one, embedding([pooled, other])) == pytest.approx(0.5, abs=1e-3)
    assert cosine(one, embedding([-pooled, tokens])) == pytest.approx(0, abs=1e-3)


def test_long_ones_are_projected_and_stay_as_alike() -> None:
    pooled, tokens = part(768, 0), part(4096, 1)
    near = [pooled + 0.5 * part(768, 2), tokens + 0.3 * part(4096, 3)]
    exact = np.mean(
        [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip([pooled, tokens], near, strict=True)]
    )
    one, other = embedding([pooled, tokens]), embedding(near)
    assert len(one or b"") == 2 * NUMBERS
    assert cosine(one, other) == pytest.approx(exact, abs=0.03)


def test_the_projection_is_the_same_in_every_process() -> None:
    signs = _signs(1000)
    assert set(np.unique(signs).tolist()) == {-1, 1}
    assert hashlib.sha256(signs.tobytes()).hexdigest()[:8] == "05a2b0a7"


@pytest.mark.parametrize("bad", [np.zeros(4), np.array([1.0, np.nan]), np.array([np.inf, 1.0])])
def test_without_a_direction_there_is_none(bad: Numbers) -> None:
    assert embedding([part(4, 0), bad]) is None
