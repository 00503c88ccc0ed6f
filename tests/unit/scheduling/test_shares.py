"""Tenants take turns by their shares, none is starved, and none is remembered for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.queue import FairShares

MANY = 1000


def test_tenants_that_come_once_are_forgotten_while_another_always_waits() -> None:
    shares, most = FairShares[str](), 0
    shares.join("lasting", 1.0)
    for number in range(MANY):
        shares.join(f"t{number}", 1.0)
        shares.charge(f"t{number}", 10.0)
        shares.leave(f"t{number}")
        if number % 4 == 3:
            shares.charge("lasting", 10.0)
        most = max(most, len(shares))
    assert most < MANY / 5


def test_a_tenant_that_comes_and_goes_unserved_is_noted_once() -> None:
    shares = FairShares[str]()
    shares.join("lasting", 1.0)
    shares.join("fickle", 1.0)
    for _ in range(2):
        shares.charge("lasting", 10.0)
        shares.charge("fickle", 100.0)
        for _ in range(MANY):
            shares.leave("fickle")
            shares.join("fickle", 1.0)
    shares.leave("fickle")
    assert len(shares) < MANY / 5


class Oracle:
    """The rule, word by word: every tag is kept for ever, and the first is looked for among all."""

    def __init__(self) -> None:
        self.virtual, self.turn = 0.0, 0
        self.tags: dict[str, tuple[float, int]] = {}
        self.jobs: dict[str, int] = {}
        self.weights: dict[str, float] = {}

    def first(self) -> str | None:
        return min(self.jobs, key=lambda tenant: self.tags[tenant], default=None)

    def set(self, tenant: str, tag: float) -> None:
        self.turn += 1
        self.tags[tenant] = tag, self.turn

    def join(self, tenant: str, weight: float) -> None:
        if tenant not in self.jobs:
            self.virtual = max(
                [self.virtual, *([min(self.tags[t][0] for t in self.jobs)] if self.jobs else [])]
            )
            self.set(tenant, max(self.virtual, self.tags.get(tenant, (0.0, 0))[0]))
        self.jobs[tenant] = self.jobs.get(tenant, 0) + 1
        self.weights[tenant] = weight

    def leave(self, tenant: str) -> None:
        self.jobs[tenant] -= 1
        if not self.jobs[tenant]:
            del self.jobs[tenant]

    def charge(self, tenant: str, work: float) -> None:
        self.virtual += work / sum(self.weights[other] for other in self.jobs)
        self.set(tenant, self.tags[tenant][0] + work / self.weights[tenant])


tenants = "".join(map(chr, range(97, 97 + 26)))
more_moves = st.lists(
    st.tuples(
        st.sampled_from(tenants), st.sampled_from(["join", "join", "serve", "leave"]), st.integers(1, 50)
    ),
    max_size=400,
)


@given(more_moves, st.sampled_from([(1.0, 1.0), (1.0, 2.0), (0.5, 4.0)]))
def test_it_is_the_rule_word_by_word(done: list[tuple[str, str, int]], weights: tuple[float, float]) -> None:
    shares, oracle = FairShares[str](), Oracle()
    for tenant, what, work in done:
        if what == "join":
            weight = weights[ord(tenant) % 2]
            shares.join(tenant, weight)
            oracle.join(tenant, weight)
        elif what == "leave" and tenant in oracle.jobs:
            shares.leave(tenant)
            oracle.leave(tenant)
        elif what == "serve" and (first := oracle.first()) is not None:
            shares.charge(first, work)
            oracle.charge(first, work)
            shares.leave(first)
            oracle.leave(first)
        for other in oracle.jobs:
            assert shares.tag(other) == pytest.approx(oracle.tags[other][0])
        found, expected = shares.first(), oracle.first()
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:  # rounding may decide between equal tags
            assert shares.tag(found) == pytest.approx(shares.tag(expected))
