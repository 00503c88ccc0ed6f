"""The approximate prompt cache: nearest by brute force, LCBFU by its definition, budgets, what goes with a template."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giornata.approximate.cache import PromptCache, embedding_of, vector_of
from giornata.approximate.eviction import Lcbfu
from giornata.approximate.index import PromptIndex, Vector
from giornata.approximate.table import SkipTable
from giornata.wire.approximate import Beginning, KeptLatent, PromptEntry, kept_steps
from giornata.wire.jobs import BlobRef

TABLE = SkipTable.model_validate(
    {"schema": 1, "table": [{"cosine": 0.95, "share": 0.5}, {"cosine": 0.75, "share": 0.2}]}
)
STEPS = 20


def unit(*values: float) -> Vector:
    made = np.array(values, dtype=np.float32)
    return made / np.linalg.norm(made)


def at(cosine: float) -> bytes:
    """An embedding that is as near to (1, 0)."""
    return embedding_of(unit(cosine, (1 - cosine * cosine) ** 0.5))


def entry(
    name: str,
    embedding: bytes,
    *,
    key: str = "k",
    kept: tuple[int, ...] = kept_steps(STEPS),
    size: int = 10,
    template: str | None = None,
    tenant: str = "t",
) -> PromptEntry:
    latents = tuple(
        KeptLatent(step=step, latents=BlobRef(key=f"{name}/{step}", size_bytes=size, sha256="0" * 64))
        for step in kept
    )
    return PromptEntry(
        entry_id=name,
        key=key,
        tenant=tenant,
        template=template,
        embedding=embedding,
        steps=STEPS,
        kept=latents,
        created_s=0,
    )


def begun(
    cache: PromptCache, embedding: bytes, rows: int = 1, key: str = "k"
) -> list[tuple[str, int] | None]:
    found = cache.find(key, embedding, rows=rows, steps=STEPS, table=TABLE)
    return [None if one is None else (one.entry, one.step) for one in found]


def test_latents_are_kept_after_a_tenth_to_half_of_the_steps() -> None:
    assert kept_steps(20) == (2, 4, 6, 8, 10)
    assert kept_steps(50) == (5, 10, 15, 20, 25)
    assert kept_steps(4) == (1, 2)
    assert kept_steps(1) == ()


def test_the_table_says_how_much_a_cosine_saves() -> None:
    cache = PromptCache(1 << 20)
    cache.add(entry("a", at(1.0)))
    assert begun(cache, at(0.97)) == [("a", 10)]
    assert begun(cache, at(0.8)) == [("a", 4)]
    assert begun(cache, at(0.7)) == [None]
    assert begun(cache, at(1.0), key="other") == [None]
    (found,) = cache.find("k", at(0.97), rows=1, steps=STEPS, table=TABLE)
    assert found is not None
    assert found.cosine == pytest.approx(0.97, abs=1e-3)
    assert found.latents.key == "a/10"


def test_rows_of_a_job_take_different_entries_the_nearest_first() -> None:
    cache = PromptCache(1 << 20)
    for name, cosine in (("far", 0.8), ("near", 0.99), ("nearest", 1.0)):
        cache.add(entry(name, at(cosine)))
    assert begun(cache, at(1.0), rows=4) == [("nearest", 10), ("near", 10), ("far", 4), None]


def test_hits_and_misses_are_counted_when_rows_begin() -> None:
    cache = PromptCache(1 << 20)
    cache.add(entry("a", at(1.0)))
    found = cache.find("k", at(1.0), rows=2, steps=STEPS, table=TABLE)
    assert (cache.counts.hits, cache.counts.misses) == (0, 0)
    cache.take(found)
    assert (cache.counts.hits, cache.counts.misses, cache.counts.saved_steps) == (1, 1, 10)


def test_the_least_uses_times_steps_saved_goes_first() -> None:
    """Of latents after 2, 4 and 10 steps, that after 2 was used five times: 12, 4 and 10."""
    cache = PromptCache(30)
    cache.add(entry("a", at(1.0), kept=(2, 4, 10)))
    two = Beginning(entry="a", step=2, latents=BlobRef(key="a/2", size_bytes=10, sha256="0" * 64), cosine=1.0)
    cache.take([two] * 5)
    changes = cache.add(entry("b", at(0.9), kept=(20,)))
    assert [ref.key for ref in changes.deleted] == ["a/4"]
    assert [one.step for one in changes.shrunk[0].kept] == [2, 10]
    assert changes.written is not None
    changes = cache.add(entry("c", at(0.9), kept=(1,)))
    assert [ref.key for ref in changes.deleted] == ["c/1"], "it is itself worth least"
    assert changes.written is None
    assert changes.removed == ()


def test_deleted_templates_take_their_entries_along() -> None:
    cache = PromptCache(1 << 20)
    cache.add(entry("a", at(1.0), template="tpl", kept=(2,)))
    cache.add(entry("b", at(1.0), template="tpl", tenant="other", kept=(2,)))
    cache.add(entry("c", at(1.0), kept=(2,)))
    changes = cache.drop("t", "tpl")
    assert changes.removed == ("a",)
    assert [ref.key for ref in changes.deleted] == ["a/2"]
    assert {one.entry_id for one in cache} == {"b", "c"}


def test_a_lost_latent_takes_its_entry_along() -> None:
    cache = PromptCache(1 << 20)
    cache.add(entry("a", at(1.0), kept=(2, 10)))
    assert cache.lost("a").removed == ("a",)
    assert cache.lost("a").removed == ()
    assert (len(cache), cache.size_bytes) == (0, 0)
    assert begun(cache, at(1.0)) == [None]


def test_an_embedding_of_another_size_is_let_go_of() -> None:
    cache = PromptCache(1 << 20)
    cache.add(entry("a", at(1.0)))
    changes = cache.add(entry("b", embedding_of(unit(1.0, 0.0, 0.0)), kept=(2,)))
    assert changes.written is None
    assert [ref.key for ref in changes.deleted] == ["b/2"]
    assert len(cache) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "take", "drop"]), st.integers(0, 9), st.integers(0, 3), st.integers(1, 9)
        ),
        max_size=60,
    ),
    st.integers(0, 120),
)
def test_latents_never_exceed_their_budget_and_each_is_deleted_once(
    actions: list[tuple[str, int, int, int]], budget: int
) -> None:
    cache, added, deleted = PromptCache(budget), set[str](), Counter[str]()
    for place, (action, number, key, size) in enumerate(actions):
        if action == "add":
            made = entry(f"e{place}", at(0.5 + number / 20), key=f"k{key}", size=size, template=f"t{number}")
            added |= {one.latents.key for one in made.kept}
            changes = cache.add(made)
        elif action == "take":
            cache.take(cache.find(f"k{key}", at(0.5 + number / 20), rows=2, steps=STEPS, table=TABLE))
            continue
        else:
            changes = cache.drop("t", f"t{number}")
        deleted.update(ref.key for ref in changes.deleted)
        held = {one.latents.key for each in cache for one in each.kept}
        assert cache.size_bytes == sum(each.size_bytes for each in cache) <= budget
        assert held == added - set(deleted)
    assert max(deleted.values(), default=1) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["add", "use", "remove", "least"]), st.integers(0, 5)), max_size=80)
)
def test_lcbfu_is_its_definition(actions: list[tuple[str, int]]) -> None:
    rule, model = Lcbfu[int](), dict[int, list[int]]()
    for age, (action, number) in enumerate(actions):
        if action == "add" and number not in model:
            rule.add(number, 1 + number % 3)
            model[number] = [1 + number % 3, 0, age]
        elif action == "use" and number in model:
            rule.use(number)
            model[number][1] += 1
        elif action == "remove":
            rule.remove(number)
            model.pop(number, None)
        worth = {name: ((1 + uses) * steps, age) for name, (steps, uses, age) in model.items()}
        assert rule.least() == (min(worth, key=worth.__getitem__) if worth else None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60))
def test_the_nearest_are_those_of_brute_force(seed: int, count: int) -> None:
    """By the product, and by the index: it is as exact with few entries."""
    chance = np.random.default_rng(seed)
    vectors = {f"e{n}": unit(*chance.normal(size=8)) for n in range(count)}
    query = unit(*chance.normal(size=8))
    expected = sorted(vectors, key=lambda name: -float(vectors[name] @ query))
    for product in (1000, 4):
        index = PromptIndex(product)
        for name, vector in vectors.items():
            index.add(name, vector)
        for name in list(vectors)[: count // 3]:
            assert index.remove(name)
            assert not index.remove(name)
        left = [name for name in expected if name not in list(vectors)[: count // 3]]
        found = index.nearest(query, 3, excluded=left[:1])
        assert [near.entry_id for near in found][:1] == left[1:2]
        assert all(
            near.cosine == pytest.approx(float(vectors[near.entry_id] @ query), abs=1e-5) for near in found
        )


def test_an_embedding_travels_in_16_bits() -> None:
    vector = unit(3.0, 4.0)
    assert vector_of(embedding_of(vector)) == pytest.approx(vector, abs=1e-3)
    assert len(embedding_of(vector)) == 4


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "at least 1"),
        ([{"cosine": 0.8, "share": 0.2}, {"cosine": 0.9, "share": 0.1}], "received 0.9: 0.1 after 0.8: 0.2"),
        ([{"cosine": 0.9, "share": 0.2}, {"cosine": 0.8, "share": 0.3}], "shares that do not grow"),
        ([{"cosine": 1.1, "share": 0.2}], "less than or equal to 1"),
        ([{"cosine": 0.9, "share": 0.6}], "less than or equal to 0.5"),
    ],
)
def test_a_malformed_table_is_refused(table: list[dict[str, float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SkipTable.model_validate({"schema": 1, "table": table})
