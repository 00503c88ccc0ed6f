"""The most alike embeddings, by product and beyond that by a graph."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.approximate.nearest import Embedding, Nearest

NUMBERS = 16


def embeddings(count: int, seed: int = 0) -> Embedding:
    """(count, NUMBERS) of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((count, NUMBERS)).astype(np.float32)
    found: Embedding = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return found


def filled(all_of: Embedding, product: int) -> Nearest:
    nearest = Nearest(NUMBERS, product)
    for number, embedding in enumerate(all_of):
        nearest.add(number, embedding)
    return nearest


@given(
    count=st.integers(0, 40),
    removed=st.sets(st.integers(0, 39)),
    asked=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_a_product_finds_what_sorting_finds(count: int, removed: set[int], asked: int, seed: int) -> None:
    all_of, query = embeddings(count, seed), embeddings(1, 99)[0]
    nearest = filled(all_of, product=1000)
    for number in removed & set(range(count)):
        nearest.remove(number)
    left = sorted(set(range(count)) - removed, key=lambda number: (-float(all_of[number] @ query), number))
    assert [each.number for each in nearest.nearest(query, asked)] == left[:asked]
    assert len(nearest) == len(left)


@pytest.mark.parametrize("count", [51, 75, 100, 101, 400])
def test_beyond_the_product_a_graph_finds_the_nearest_too_while_it_takes_over(count: int) -> None:
    all_of = embeddings(count)
    nearest = filled(all_of, product=50)
    assert len(nearest) == count
    assert len(nearest._matrix) == max(0, 100 - count)
    for number in (0, 3, 24, 25, 49, 50, count - 1):
        (found,) = nearest.nearest(all_of[number], 1)
        assert found.number == number
        assert found.cosine == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("product", [50, 1000])
def test_what_was_removed_is_found_no_more_and_its_place_is_used_again(product: int) -> None:
    all_of = embeddings(75)
    nearest = filled(all_of, product)
    for number in (3, 40, 60):  # with a product of 50: moved to the graph, not moved, begun there
        nearest.remove(number)
        assert number not in {each.number for each in nearest.nearest(all_of[number], 75)}
    for number in (3, 40, 60):
        nearest.add(75 + number, all_of[number])
        assert nearest.nearest(all_of[number], 1)[0].number == 75 + number
    assert len(nearest) == 75


def test_without_usearch_the_product_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    all_of = embeddings(300)
    nearest = filled(all_of, product=50)
    assert [nearest.nearest(each, 1)[0].number for each in all_of] == list(range(300))


def test_usearch_is_not_imported_before_it_is_needed() -> None:
    import subprocess  # noqa: PLC0415

    code = (
        "import sys, numpy as np; from giornata.approximate.nearest import Nearest; n = Nearest(2);"
        "n.add(0, np.float32([1, 0])); n.nearest(np.float32([1, 0]), 1); print('usearch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_another_size_is_refused_and_finds_nothing() -> None:
    nearest = filled(embeddings(2), product=50)
    with pytest.raises(ValueError, match=r"\(4,\); accepted: \(16,\)"):
        nearest.add(7, np.zeros(4, np.float32))
    assert nearest.nearest(np.zeros(4, np.float32), 1) == []
