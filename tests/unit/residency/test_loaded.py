"""Tiers: one load at a time of each name, within a budget, whatever threads ask."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from giornata.residency.tiers import LoadedTier, TierLookup
from tests.patience import HUNG_S

NAMES = "abcd"


def tier(budget_bytes: int = 10) -> LoadedTier[str]:
    return LoadedTier(budget_bytes, len)


def test_threads_that_want_one_value_wait_for_one_load() -> None:
    shelf, reading, gate = tier(), threading.Event(), threading.Event()
    reads: list[int] = []

    def read() -> str:
        reads.append(1)
        reading.set()
        assert gate.wait(HUNG_S)
        return "value"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(shelf.load, "a", read)
        assert reading.wait(HUNG_S)
        others = [pool.submit(shelf.load, "a", read) for _ in range(3)]
        gate.set()
        assert first.result() == TierLookup("value", loaded=True)
        assert {each.result() for each in others} == {TierLookup("value", loaded=False)}
    assert len(reads) == 1


def test_a_load_that_fails_is_tried_again() -> None:
    shelf = tier()

    def fails() -> str:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        shelf.load("a", fails)
    assert shelf.load("a", lambda: "value").value == "value"


def test_what_was_removed_meanwhile_is_given_and_not_kept() -> None:
    shelf = tier()
    assert shelf.load("a", lambda: "value", lambda: False).value == "value"
    assert shelf.get("a") is None


class Holding(RuleBasedStateMachine):
    """Any order of loads, pins and removals against a list in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = tier()
        self.model: list[tuple[str, int]] = []
        self.pins: dict[str, list[AbstractContextManager[None]]] = {name: [] for name in NAMES}

    def evict(self, keep: str | None = None) -> None:
        for name, size in list(self.model):
            if sum(each for _, each in self.model) <= 10:
                return
            if name != keep and not self.pins[name]:
                self.model.remove((name, size))

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 12))
    def load(self, name: str, size: int) -> None:
        here = dict(self.model)
        found = self.tier.load(name, lambda: "x" * size)
        assert found.loaded == (name not in here)
        assert len(found.value or "") == here.get(name, size)
        self.model = [each for each in self.model if each[0] != name]
        if name not in here and size > 10 and not self.pins[name]:
            return  # it is given, not kept, and nothing has to go for it
        self.model.append((name, here.get(name, size)))
        if name not in here:
            self.evict(keep=name)

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        held = self.tier.pinned(name)
        held.__enter__()
        self.pins[name].append(held)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        if self.pins[name]:
            self.pins[name].pop().__exit__(None, None, None)
            self.evict()

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        assert self.tier.remove(name) == (name in dict(self.model))
        self.model = [each for each in self.model if each[0] != name]

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        assert list(self.tier) == [name for name, _ in self.model]
        assert self.tier.size_bytes == sum(size for _, size in self.model)
        unpinned = sum(size for name, size in self.model if not self.pins[name])
        assert unpinned <= 10


TestHolding = Holding.TestCase
