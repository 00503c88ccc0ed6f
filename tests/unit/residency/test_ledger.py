"""The ledger: nothing beyond its budget, the least recently used goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.ledger import EvictionLedger

NAMES = st.sampled_from("abcdef")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(0, 12)),
        st.tuples(st.sampled_from(["use", "pin", "unpin", "remove"]), NAMES, st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(0, 20))
def test_a_ledger_keeps_to_its_budget_and_to_the_order_of_use(  # noqa: C901 - a model, action by action
    actions: list[tuple[str, str, int]], budget: int
) -> None:
    """Beside a model of it: a list in order of use."""
    ledger = EvictionLedger(budget)
    order: list[str] = []
    sizes: dict[str, int] = {}
    pins: dict[str, int] = {}
    for action, name, size in actions:
        gone: tuple[str, ...] = ()
        made_room = action == "add" or (action == "unpin" and pins.get(name, 0) > 0)
        if action == "add":
            gone = ledger.add(name, size)
            if name in order:
                order.remove(name)
            if size <= budget or pins.get(name):
                order.append(name)
                sizes[name] = size
            else:
                assert gone == (name,)
                assert name not in ledger
                continue
        elif action == "use" and name in order:
            ledger.use(name)
            order.append(order.pop(order.index(name)))
        elif action == "pin":
            ledger.pin(name)
            pins[name] = pins.get(name, 0) + 1
        elif action == "unpin" and pins.get(name):
            gone = ledger.unpin(name)
            pins[name] -= 1
        elif action == "remove":
            assert ledger.remove(name) == (name in order)
            if name in order:
                order.remove(name)
        free = [n for n in order if not pins.get(n) and not (action == "add" and n == name)]
        expected = []
        while made_room and sum(sizes[n] for n in order) > budget and free:
            expected.append(free.pop(0))
            order.remove(expected[-1])
        assert list(gone) == expected
        assert ledger.size_bytes == sum(sizes[n] for n in order)
        assert [n in ledger for n in "abcdef"] == [n in order for n in "abcdef"]


def test_a_pin_that_is_not_there_is_not_taken_back() -> None:
    with pytest.raises(ValueError, match="a is not pinned"):
        EvictionLedger(1).unpin("a")
