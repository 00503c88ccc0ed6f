"""Entries by key and prompt: what is found, what goes, and that nothing is left of what went."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.approximate.cache import PromptCache
from giornata.approximate.entries import Hit, embedding_of
from giornata.approximate.nearest import Embedding
from giornata.approximate.table import Table, Threshold
from giornata.wire.prompts import PromptEntry
from tests.unit.approximate.entries import embedding, entry

TABLE = Table(thresholds=(Threshold(cosine=0.95, share=0.5), Threshold(cosine=0.75, share=0.2)))
STEPS = 20
ALL = (2, 4, 6, 8, 10)


def like(cosine: float) -> tuple[float, ...]:
    """An embedding with this cosine to (1, 0, 0, 0)."""
    return (cosine, math.sqrt(1 - cosine**2), 0, 0)


def sought(*numbers: float) -> Embedding:
    found = embedding_of(embedding(*numbers))
    assert found is not None
    return found


def find(cache: PromptCache, key: str = "key", count: int = 1, taken: tuple[str, ...] = ()) -> list[Hit]:
    return cache.find(key, sought(1, 0, 0, 0), TABLE, STEPS, 0.0, count=count, taken=taken)


def cached(*entries: PromptEntry, budget: int = 10_000) -> PromptCache:
    cache = PromptCache(budget)
    for each in entries:
        cache.add(each, 0.0)
    return cache


@pytest.mark.parametrize(("cosine", "step"), [(1.0, 10), (0.96, 10), (0.9, 4), (0.76, 4)])
def test_more_alike_prompts_save_more_steps(cosine: float, step: int) -> None:
    (hit,) = find(cached(entry("a", like(cosine), steps=ALL)))
    assert (hit.entry, hit.step, hit.latents.key) == ("a", step, f"a/{step}")
    assert hit.cosine == pytest.approx(cosine, abs=2e-3)


def test_less_alike_ones_save_none() -> None:
    assert find(cached(entry("a", like(0.7), steps=ALL))) == []


def test_another_key_is_never_met() -> None:
    assert find(cached(entry("a", steps=ALL)), key="other") == []


def test_a_latent_of_an_earlier_step_serves_where_that_of_the_step_has_gone() -> None:
    assert find(cached(entry("a", steps=(4, 8))))[0].step == 8
    assert find(cached(entry("a", like(0.8), steps=(6, 8)))) == []


def test_rows_of_a_job_take_different_entries() -> None:
    cache = cached(entry("a", like(0.99)), entry("b", like(0.97)), entry("c", like(0.98)))
    assert [hit.entry for hit in find(cache, count=2)] == ["a", "c"]
    assert [hit.entry for hit in find(cache, count=10)] == ["a", "c", "b"]
    assert [hit.entry for hit in find(cache, count=10, taken=("a", "c"))] == ["b"]


def test_no_entry_is_found_after_its_time_which_a_use_prolongs() -> None:
    cache = cached(entry("a", until_s=10.0))
    (hit,) = find(cache)
    cache.use(hit, until_s=20.0)
    assert cache.expire(15.0).ended == ()
    assert cache.find("key", sought(1, 0, 0, 0), TABLE, STEPS, 20.0) == []
    assert cache.expire(20.0).ended == ("a",)
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_beyond_the_budget_the_least_worth_latents_go_and_their_entry_with_the_last() -> None:
    cache = cached(entry("a"), budget=30)
    gone = cache.add(entry("b"), 0.0)
    assert [ref.key for ref in gone.latents] == ["a/2"]
    assert [(each.entry_id, [kept.step for kept in each.kept]) for each in gone.changed] == [("a", [4])]
    gone = cache.add(entry("c", steps=(8, 10)), 0.0)
    assert [ref.key for ref in gone.latents] == ["b/2", "a/4"]
    assert gone.ended == ("a",)
    assert (cache.evicted, cache.size_bytes, len(cache)) == (3, 30, 2)


def test_a_deleted_template_takes_the_entries_of_its_tenant_along() -> None:
    cache = cached(entry("a"), entry("b", template="other"), entry("c", tenant="another"))
    gone = cache.remove_template("default", "template")
    assert gone.ended == ("a",)
    assert [ref.key for ref in gone.latents] == ["a/2", "a/4"]
    assert {each.entry_id for each in cache.entries()} == {"b", "c"}
    assert cache.remove_template("default", "template").ended == ()


def test_a_latent_that_is_lost_is_found_no_more() -> None:
    cache = cached(entry("a"))
    gone = cache.lose("a", 4)
    assert ([ref.key for ref in gone.latents], find(cache)[0].step) == (["a/4"], 2)
    cache.lose("a", 2)
    assert find(cache) == []
    assert cache.lose("a", 2) == cache.lose("b", 2)


def test_an_entry_that_comes_again_is_there_once() -> None:
    cache = cached(entry("a"), entry("a", steps=(2, 4, 6)))
    assert (len(cache), cache.size_bytes) == (1, 30)


@pytest.mark.parametrize(
    "numbers", [(), (0, 0, 0, 0), (math.nan, 0, 0, 0), (1, 0)], ids=["none", "zeros", "nan", "another size"]
)
def test_an_embedding_without_a_direction_or_of_another_size_is_not_kept(numbers: tuple[float, ...]) -> None:
    cache = cached(entry("a"))
    gone = cache.add(entry("b", numbers), 0.0)
    assert gone.ended == ("b",)
    assert [ref.key for ref in gone.latents] == ["b/2", "b/4"]
    assert len(cache) == 1


_KEYS = st.sampled_from(["k", "l"])


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "lose", "remove", "expire"]),
            st.integers(0, 7),
            _KEYS,
            st.integers(1, 30),
        ),
        max_size=60,
    )
)
def test_what_is_kept_and_what_went_are_all_that_came(acts: list[tuple[str, int, str, int]]) -> None:
    cache, came, went = PromptCache(100), set[str](), set[str]()
    for act, number, key, size in acts:
        name = f"{number}"
        if act == "add" and name not in {each.entry_id for each in cache.entries()}:
            given_one = entry(
                name, like(0.9 + number / 100), key=key, size_bytes=size, template=key, until_s=50 + size
            )
            came |= {f"{name}/{step}" for step in (2, 4)}
            went -= {f"{name}/{step}" for step in (2, 4)}
            gone = cache.add(given_one, 0.0)
        elif act == "use":
            for hit in find(cache, key):
                cache.use(hit, 100.0)
            continue
        elif act == "lose":
            gone = cache.lose(name, 2)
        elif act == "remove":
            gone = cache.remove_template("default", key)
        else:
            gone = cache.expire(50.0 + size)
        went |= {ref.key for ref in gone.latents}
        held = {kept.latents.key for each in cache.entries() for kept in each.kept}
        assert held.isdisjoint(went)
        assert held | went == came
        assert (
            cache.size_bytes
            == sum(kept.latents.size_bytes for each in cache.entries() for kept in each.kept)
            <= 100
        )
        for each in cache.entries():
            assert np.isfinite(find(cache, each.key, count=20)[0].cosine)
