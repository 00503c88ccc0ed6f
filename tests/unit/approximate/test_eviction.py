"""LCBFU: the least uses times steps saved go first, of equals the longest unused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.approximate.eviction import Lcbfu


def test_what_saves_fewer_steps_goes_first_and_uses_count() -> None:
    kept = Lcbfu[str](30)
    for name, steps in (("two", 2), ("ten", 10), ("four", 4)):
        kept.add(name, 10, steps)
    for _ in range(4):
        kept.use("two")  # 5 x 2 is 10, as 1 x 10 of "ten", which was not used for longer
    kept.add("six", 10, 6)
    assert list(kept.evict()) == ["four"]
    kept.add("nine", 10, 9)
    assert list(kept.evict()) == ["six"]
    kept.add("twenty", 20, 20)
    assert list(kept.evict()) == ["nine", "ten"]


def test_what_is_larger_than_the_budget_goes_with_all() -> None:
    kept = Lcbfu[str](5)
    kept.add("large", 6, 10)
    assert list(kept.evict()) == ["large"]
    assert (len(kept), kept.size_bytes) == (0, 0)


_ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove"]), st.integers(0, 9), st.integers(1, 50)), max_size=200
)


@given(acts=_ACTS, budget=st.integers(0, 120))
def test_the_budget_holds_and_the_least_worth_goes(acts: list[tuple[str, int, int]], budget: int) -> None:
    kept = Lcbfu[int](budget)
    sizes: dict[int, int] = {}
    worth: dict[int, tuple[int, int, int]] = {}
    for turn, (act, name, number) in enumerate(acts):
        if act == "add":
            kept.add(name, number, 1 + number % 5)
            sizes[name], worth[name] = number, (1, 1 + number % 5, turn)
        elif act == "use" and name in sizes:
            kept.use(name)
            worth[name] = (worth[name][0] + 1, worth[name][1], turn)
        elif act == "remove":
            kept.remove(name)
            sizes.pop(name, None)
        for gone in kept.evict():
            least = min(sizes, key=lambda each: (worth[each][0] * worth[each][1], worth[each][2]))
            assert gone == least
            del sizes[gone]
        assert kept.size_bytes == sum(sizes.values()) <= max(budget, 0)
        assert len(kept) == len(sizes)
